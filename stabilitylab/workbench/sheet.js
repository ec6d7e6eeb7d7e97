// Draws the marks of a scene on a canvas, with as many pixels as the screen has.
const POINT = 4 / 3; // pixels of a page in a point
const DASHES = { '-': [], '--': [5, 3], '-.': [6, 3, 1.5, 3], ':': [1.5, 2.5] };
const FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const NARROW = 560; // pixels of a sheet below which its words become smaller

const asFloats = (view) => new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

// a marker of one letter, as matplotlib names them, around the origin; whether it is filled
const MARKERS = {
  o: (pen, r) => pen.arc(0, 0, r, 0, 2 * Math.PI),
  '.': (pen, r) => pen.arc(0, 0, r / 2, 0, 2 * Math.PI),
  s: (pen, r) => pen.rect(-r, -r, 2 * r, 2 * r),
  x: (pen, r) => { pen.moveTo(-r, -r); pen.lineTo(r, r); pen.moveTo(-r, r); pen.lineTo(r, -r); },
  '^': (pen, r) => { pen.moveTo(-r, r); pen.lineTo(0, -r); pen.lineTo(r, r); pen.closePath(); },
  v: (pen, r) => { pen.moveTo(-r, -r); pen.lineTo(0, r); pen.lineTo(r, -r); pen.closePath(); },
};

const drawMarker = (pen, look, x, y) => {
  const shape = MARKERS[look.marker] || MARKERS.o, isOpen = look.marker === 'x' || !look.filled;
  pen.save();
  pen.translate(x, y);
  pen.setLineDash([]);
  pen.beginPath();
  shape(pen, (look.size / 2) * POINT);
  if (!isOpen) { pen.fillStyle = look.colour; pen.fill(); }
  else { pen.strokeStyle = look.edge; pen.lineWidth = 1.3 * POINT; pen.stroke(); }
  pen.restore();
};

const drawLine = (pen, line, place, count) => {
  const dash = DASHES[line.style];
  pen.globalAlpha = line.alpha;
  pen.strokeStyle = line.colour;
  if (dash) {
    pen.lineWidth = line.width * POINT;
    pen.setLineDash(dash.map(part => part * line.width * POINT));
    pen.beginPath();
    let isUp = true;
    for (let k = 0; k < count; k++) {
      const y = line.points[count + k];
      if (Number.isNaN(y)) { isUp = true; continue; }
      const [px, py] = place(line.points[k], y);
      if (isUp) pen.moveTo(px, py); else pen.lineTo(px, py);
      isUp = false;
    }
    pen.stroke();
  }
  if (line.marker) {
    for (let k = 0; k < count; k++) {
      const y = line.points[count + k];
      if (!Number.isNaN(y)) drawMarker(pen, line, ...place(line.points[k], y));
    }
  }
  pen.globalAlpha = 1;
  pen.setLineDash([]);
};

const UP = { bottom: 'alphabetic', baseline: 'alphabetic', top: 'top', center: 'middle', center_baseline: 'middle' };

const drawWords = (pen, text, place, scale) => {
  const [x0, y0] = place(...text.at), x = x0 + text.away[0] * POINT * scale, y = y0 - text.away[1] * POINT * scale;
  const size = text.size * POINT * scale;
  pen.font = (text.ground ? 'bold ' : '') + size + 'px ' + FONT;
  pen.textAlign = text.across;
  pen.textBaseline = UP[text.up] || 'alphabetic';
  if (text.ground) {
    const wide = pen.measureText(text.words).width, rim = size * 0.35, low = y + size * 0.3;
    const from = x - rim - (text.across === 'center' ? wide / 2 : 0);
    pen.fillStyle = text.ground;
    pen.beginPath();
    pen.roundRect(from, low - size * 1.4, wide + 2 * rim, size * 1.4, size * 0.25);
    pen.fill();
  }
  pen.fillStyle = text.colour;
  pen.fillText(text.words, x, y);
};

const drawKeys = (pen, keys, right, base, scale, sheet) => {
  pen.font = 8 * POINT * scale + 'px ' + FONT;
  pen.textAlign = 'left';
  pen.textBaseline = 'middle';
  const gap = 14 * scale, swatch = 18 * scale;
  let x = right - keys.reduce((sum, key) => sum + swatch + 5 + pen.measureText(key.words).width + gap, -gap);
  for (const key of keys) {
    const ends = { points: [x, x + swatch, base, base] };
    drawLine(pen, { ...key, ...ends, marker: '' }, (a, b) => [a, b], 2);
    if (key.marker) drawMarker(pen, key, x + swatch / 2, base);
    pen.fillStyle = sheet.text;
    pen.fillText(key.words, x + swatch + 5, base);
    x += swatch + 5 + pen.measureText(key.words).width + gap;
  }
};

// a table of values as colours; behind the 256 of the scale those of infinite, zero, NaN (-1) and absent (NaN) ones
const pixelsOf = (map) => {
  const image = new ImageData(map.columns, map.rows), colours = map.colours, span = Math.log(map.high / map.low);
  for (let k = 0; k < map.values.length; k++) {
    const value = map.values[k];
    let at = value === 0 ? 257 : value < 0 ? 258 : 259;
    if (value === Infinity) at = 256;
    else if (value > 0) at = Math.min(255, Math.max(0, Math.floor(Math.log(value / map.low) / span * 256)));
    for (let part = 0; part < 3; part++) image.data[4 * k + part] = colours[3 * at + part];
    image.data[4 * k + 3] = 255;
  }
  const canvas = document.createElement('canvas');
  canvas.width = map.columns; canvas.height = map.rows;
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
};

const drawTicks = (pen, panel, sheet, place, scale) => {
  const [left, low] = place(0, 0), [right, top] = place(1, 1), edge = Math.round;
  pen.lineWidth = 0.7 * POINT;
  pen.strokeStyle = sheet.grid;
  pen.beginPath();
  if (!panel.map) {
    for (const [at] of panel.x_ticks) { const x = edge(place(at, 0)[0]) + 0.5; pen.moveTo(x, low); pen.lineTo(x, top); }
    for (const [at] of panel.y_ticks) { const y = edge(place(0, at)[1]) + 0.5; pen.moveTo(left, y); pen.lineTo(right, y); }
  }
  pen.stroke();
  pen.fillStyle = sheet.text;
  pen.font = (panel.map ? 7 : 9) * POINT * scale + 'px ' + FONT;
  pen.textAlign = panel.right ? 'left' : 'right';
  pen.textBaseline = 'middle';
  for (const [at, words] of panel.y_ticks) pen.fillText(words, panel.right ? right + 5 : left - 6, place(0, at)[1]);
  pen.font = 9 * POINT * scale + 'px ' + FONT;
  pen.textAlign = 'center';
  pen.textBaseline = 'top';
  if (panel.has_steps) {
    for (const [at, words] of panel.x_ticks) pen.fillText(words, place(at, 0)[0], low + 6);
    pen.fillText(panel.x_name, (left + right) / 2, low + 5 + 10 * POINT * scale);
  }
  if (panel.y_name && panel.right) { // the scale: its name has no room beside it
    pen.font = 8.2 * POINT * scale + 'px ' + FONT;
    pen.textAlign = 'right';
    pen.textBaseline = 'alphabetic';
    pen.fillText(panel.y_name, sheet.wide - 4, top - 8);
  } else if (panel.y_name) {
    pen.save();
    pen.translate(left - 40 * scale, (low + top) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(panel.y_name, 0, 0);
    pen.restore();
  }
};

const drawEdges = (pen, panel, sheet, place) => {
  const [left, low] = place(0, 0), [right, top] = place(1, 1), x = Math.round(left) + 0.5, y = Math.round(low) + 0.5;
  pen.lineWidth = 0.7 * POINT;
  pen.strokeStyle = sheet.faint;
  pen.beginPath();
  pen.moveTo(x, top); pen.lineTo(x, y); pen.lineTo(right, y);
  pen.stroke();
};

const drawPanel = (pen, panel, sheet, wide, tall, scale) => {
  const place = (x, y) => [(panel.left + x * panel.width) * wide, (panel.top + (1 - y) * panel.height) * tall];
  const [left, low] = place(0, 0), [right, top] = place(1, 1);
  for (const { box: [x0, y0, x1, y1], colour, alpha } of panel.bands) {
    const [from, under] = place(Math.max(0, x0), Math.max(0, y0)), [to, over] = place(Math.min(1, x1), Math.min(1, y1));
    pen.globalAlpha = alpha; pen.fillStyle = colour;
    pen.fillRect(from, over, to - from, under - over);
  }
  pen.globalAlpha = 1;
  if (panel.map) {
    pen.imageSmoothingEnabled = false;
    pen.drawImage(panel.map.canvas ||= pixelsOf(panel.map), left, top, right - left, low - top);
  }
  drawTicks(pen, panel, sheet, place, scale);
  for (const isClipped of [true, false]) {
    pen.save();
    if (isClipped) { pen.beginPath(); pen.rect(left, top, right - left, low - top); pen.clip(); }
    for (const line of panel.lines) if (line.clipped === isClipped) drawLine(pen, line, place, line.points.length / 2);
    pen.restore();
  }
  drawEdges(pen, panel, sheet, place);
  for (const text of panel.words) drawWords(pen, text, place, scale);
  const above = panel.heading.above * POINT * scale;
  if (panel.keys.length) drawKeys(pen, panel.keys, right, top - above - 4 * scale, scale, sheet);
  pen.font = 8.2 * POINT * scale + 'px ' + FONT;
  pen.textAlign = 'left';
  pen.textBaseline = 'alphabetic';
  pen.fillStyle = sheet.faint;
  pen.fillText(panel.heading.words, left, top - above);
};

// draws everything; how tall the canvas became, in pixels of the page
const drawSheet = (canvas, sheet, panels, wide) => {
  const tall = wide * sheet.ratio, sharp = window.devicePixelRatio || 1;
  canvas.width = Math.round(wide * sharp); canvas.height = Math.round(tall * sharp);
  canvas.style.height = tall + 'px';
  const pen = canvas.getContext('2d');
  pen.scale(sharp, sharp);
  pen.fillStyle = sheet.ground;
  pen.fillRect(0, 0, wide, tall);
  pen.lineJoin = 'round';
  for (const panel of panels) drawPanel(pen, panel, { ...sheet, wide }, wide, tall, Math.min(1, Math.max(0.75, wide / NARROW)));
  return tall;
};
