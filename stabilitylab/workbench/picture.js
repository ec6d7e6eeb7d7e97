// A picture with places: the kernel draws, the page reads values off it and sends gestures back in data coordinates.
const CLOSE = 9; // CSS pixels within which a flag or a rim mark is meant
const HELP = ' Arrow keys move the cursor, Enter selects, plus and minus zoom, Escape shows everything, drag upright for a range of values, Z and Y undo and redo a zoom.';

const make = (tag, name, parent) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  parent.append(element);
  return element;
};

const asBytes = (view) => view instanceof DataView ? new Uint8Array(view.buffer, view.byteOffset, view.byteLength) : new Uint8Array(0);

// x and y of a series, as float64: first all x, then all y
const asPoints = (series) => {
  const numbers = new Float64Array(asBytes(series.xy).slice().buffer);
  const count = numbers.length / 2;
  return { ...series, x: numbers.subarray(0, count), y: numbers.subarray(count) };
};

// index of the entry of an ascending array that is nearest to a value
const nearest = (values, at) => {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < at) low = middle; else high = middle;
  }
  return at - values[low] <= values[high] - at ? low : high;
};

// what the axis counts beside the steps, read between the places where it is known
const counted = (panel, step) => {
  const told = panel.counted;
  if (!told || !told.x.length) return '';
  const k = nearest(told.x, step), other = told.x[k] < step ? Math.min(k + 1, told.x.length - 1) : Math.max(k - 1, 0);
  const wide = told.x[other] - told.x[k], share = wide ? Math.min(1, (step - told.x[k]) / wide) : 0;
  return ' · ' + words(told.y[k] + share * (told.y[other] - told.y[k])) + ' ' + told.label;
};

const words = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(3);
  return Number(value.toPrecision(5)).toLocaleString('en-US', { maximumFractionDigits: 7 });
};

// a cell of a map: -1 stands for a value that was measured and is NaN, NaN for one that nobody measured
const cellWords = (value, absent) => value === -1 ? 'NaN' : Number.isNaN(value) ? absent : Number.isFinite(value) ? words(value) : String(value);

const heightOf = (panel, y) => {
  const share = panel.log ? Math.log(y / panel.y0) / Math.log(panel.y1 / panel.y0) : (y - panel.y0) / (panel.y1 - panel.y0);
  return panel.top + (1 - share) * panel.height;
};

function render({ model, el }) {
  el.classList.add('stl-figure');
  const box = make('div', '', el);
  box.tabIndex = 0;
  box.setAttribute('role', 'application');
  box.dataset.lmSuppressShortcuts = 'true';
  const img = make('img', '', box), canvas = make('canvas', '', box);
  img.draggable = false;
  canvas.setAttribute('aria-hidden', 'true');
  const band = make('div', 'stl-band', box);
  const hair = make('div', 'stl-hair', box);
  const chosen = make('div', 'stl-chosen', box);
  const dots = make('div', 'stl-dots', box);
  const readout = make('div', 'stl-readout', box);
  readout.setAttribute('aria-live', 'polite');
  const legend = make('div', 'stl-legend', el);
  let start = null, url = null, panels = [], pan = false, wheel = null;

  // a button an entry; a click hides it, and shows it again
  const list = () => {
    const hidden = model.get('hidden') || [];
    legend.replaceChildren();
    for (const entry of model.get('legend') || []) {
      const isHidden = hidden.includes(entry.name), button = make('button', isHidden ? 'off' : '', legend);
      button.type = 'button';
      button.setAttribute('aria-pressed', String(!isHidden));
      button.title = (isHidden ? 'show ' : 'hide ') + entry.label;
      make('i', '', button).style.background = entry.colour;
      make('span', '', button).textContent = entry.label;
      button.addEventListener('click', () => {
        const now = model.get('hidden') || [];
        send('hidden', now.includes(entry.name) ? now.filter(n => n !== entry.name) : [...now, entry.name]);
        list();
      });
    }
  };

  const isDrawn = () => Boolean((model.get('sheet') || {}).ratio);
  // the marks of a scene, again whenever the page gives them another width or another screen
  let drawn = 0;
  const paint = () => {
    canvas.style.display = isDrawn() ? 'block' : 'none';
    if (!isDrawn() || !box.clientWidth) return;
    if (!panels.length) take();
    drawSheet(canvas, model.get('sheet'), panels, box.clientWidth);
    box.dataset.drawn = ++drawn;
  };
  const draw = () => {
    const bytes = asBytes(model.get('png'));
    if (url) URL.revokeObjectURL(url);
    url = bytes.length ? URL.createObjectURL(new Blob([bytes], { type: 'image/png' })) : null;
    if (url) img.src = url; else img.removeAttribute('src');
    img.alt = model.get('alt');
    img.style.display = isDrawn() || !url ? 'none' : '';  // nothing to show yet is no broken picture
    box.setAttribute('aria-label', model.get('alt') + HELP);
  };
  const take = () => {
    panels = (model.get('panels') || []).map(p => ({
      ...p,
      series: (p.series || []).map(asPoints),
      counted: p.counted ? asPoints(p.counted) : null,
      lines: (p.lines || []).map(line => ({ ...line, points: asFloats(line.xy) })),
      map: p.map ? { ...p.map, values: asFloats(p.map.values), colours: asBytes(p.map.colours) } : null,
    }));
  };
  const place = (event) => {
    if (!panels.length) take(); // a view that was hidden may have missed the event
    const r = box.getBoundingClientRect();
    return [(event.clientX - r.left) / r.width, (event.clientY - r.top) / r.height];
  };
  const panelAt = (fy) => panels.findIndex(p => fy >= p.top - 0.02 && fy <= p.top + p.height + 0.02);
  const toData = (fx, fy) => {
    const i = panelAt(fy), p = panels[i < 0 ? 0 : i];
    if (!p) return null;
    const u = Math.min(1, Math.max(0, (fx - p.left) / p.width));
    const v = Math.min(1, Math.max(0, 1 - (fy - p.top) / p.height));
    const y = p.log ? p.y0 * Math.pow(p.y1 / p.y0, v) : p.y0 + v * (p.y1 - p.y0);
    return { x: p.x0 + u * (p.x1 - p.x0), y, panel: i };
  };
  const toShare = (p, x) => p.left + (x - p.x0) / (p.x1 - p.x0) * p.width;
  const send = (name, value) => { model.set(name, value); model.save_changes(); };
  let count = 0; // a gesture that repeats the one before it is sent too
  const click = (place) => send('clicked', { finding: -1, ...place, n: ++count });
  const brush = (range) => send('brushed', { range, n: ++count });
  const ask = (what) => send('wish', { what, n: ++count });

  // the flag under the pointer: above the first panel, or its line at the top of it
  const flagAt = (fx, fy) => {
    const p = panels[0];
    if (!p || fy > p.top + 0.03) return -1;
    const away = (model.get('marks') || []).map(m => [Math.abs(toShare(p, m.x) - fx) * box.clientWidth, m.index]);
    const [best] = away.filter(([pixels]) => pixels <= CLOSE).sort((a, b) => a[0] - b[0]);
    return best ? best[1] : -1;
  };

  const read = (fx, fy) => {
    const first = panels[0];
    if (!first || fx < first.left - 0.005 || fx > first.left + first.width + 0.005) return hide();
    const at = toData(fx, fy);
    const lines = [], spots = [];
    let step = Math.round(at.x);
    panels.forEach((p, i) => {
      for (const s of p.series) {
        if (!s.x.length) continue;
        const k = nearest(s.x, at.x), near = Math.abs(toShare(p, s.x[k]) - fx) * box.clientWidth;
        if (s.broken) { if (near <= CLOSE / 2) lines.push([s.colour, s.label, s.broken]); continue; }
        if (!lines.length) step = s.x[k];
        lines.push([s.colour, s.label, words(s.y[k]) + (s.units && s.units !== '1' ? ' ' + s.units : '')]);
        const height = heightOf(p, s.y[k]);
        if (s.x[k] >= p.x0 && s.x[k] <= p.x1 && height >= p.top && height <= p.top + p.height) spots.push([toShare(p, s.x[k]), height, s.colour]);
      }
      if (p.rows && panelAt(fy) === i) {
        const row = p.rows[Math.floor(at.y)], map = p.map;
        if (row === undefined) return;
        const column = map && Math.min(map.columns - 1, Math.max(0, Math.floor((at.x - p.x0) / (p.x1 - p.x0) * map.columns)));
        const value = map ? map.values[Math.floor(at.y) * map.columns + column] : null;
        lines.push(['transparent', row, map ? cellWords(value, map.absent) : '']);
      }
    });
    if (!lines.length) return hide();
    readout.replaceChildren();
    const axis = first.counted ? 'step' : first.x_name || 'step'; // runs may lie along tokens or time
    make('b', '', readout).textContent = axis + ' ' + step.toLocaleString('en-US') + counted(first, step);
    for (const [colour, label, value] of lines) {
      const row = make('div', '', readout), chip = make('i', '', row);
      chip.style.background = colour;
      make('span', '', row).textContent = label;
      make('em', '', row).textContent = value;
    }
    dots.replaceChildren();
    for (const [x, y, colour] of spots) {
      const dot = make('i', '', dots);
      dot.style.left = x * 100 + '%'; dot.style.top = y * 100 + '%'; dot.style.background = colour;
    }
    open(fx);
  };
  // the findings of the flag under the pointer, those that share it and have no room on it among them
  const name = (index, fx) => {
    const mark = (model.get('marks') || []).find(m => m.index === index);
    readout.replaceChildren();
    for (const words of mark.findings || []) make('div', '', readout).textContent = words;
    dots.replaceChildren();
    open(fx);
  };
  const open = (fx) => {
    readout.style.display = 'block';
    const right = fx > 0.6;
    readout.style.left = right ? 'auto' : 'calc(' + fx * 100 + '% + 12px)';
    readout.style.right = right ? 'calc(' + (1 - fx) * 100 + '% + 12px)' : 'auto';
    readout.style.top = Math.max(0, panels[0].top) * 100 + 2 + '%';
  };
  // a drag on the first panel that goes up or down rather than along the steps
  const isUpright = (from, to) => {
    const p = panels[0], inside = p && from[1] > p.top && from[1] < p.top + p.height;
    const wide = Math.abs(to[0] - from[0]) * box.clientWidth, tall = Math.abs(to[1] - from[1]) * box.clientHeight;
    return Boolean(inside && tall > 12 && tall > 2 * wide);
  };
  const hide = () => { readout.style.display = 'none'; dots.replaceChildren(); };

  box.addEventListener('pointerdown', e => {
    if (e.button !== 0) return;
    start = place(e); pan = e.shiftKey;
    box.setPointerCapture(e.pointerId); box.focus({ preventScroll: true });
  });
  box.addEventListener('pointermove', e => {
    const [fx, fy] = place(e);
    hair.style.display = 'block'; hair.style.left = fx * 100 + '%';
    const flag = flagAt(fx, fy);
    box.style.cursor = flag >= 0 ? 'pointer' : '';
    if (!start) return flag >= 0 ? name(flag, fx) : read(fx, fy);
    hide();
    const upright = isUpright(start, [fx, fy]), along = upright ? fy - start[1] : fx - start[0];
    band.style.display = !pan && Math.abs(along) > 0.005 ? 'block' : 'none';
    band.classList.toggle('upright', upright);
    band.style.left = upright ? 0 : Math.min(fx, start[0]) * 100 + '%';
    band.style.width = upright ? '100%' : Math.abs(fx - start[0]) * 100 + '%';
    band.style.top = upright ? Math.min(fy, start[1]) * 100 + '%' : 0;
    band.style.bottom = upright ? (1 - Math.max(fy, start[1])) * 100 + '%' : 0;
  });
  box.addEventListener('pointerleave', () => { hair.style.display = 'none'; hide(); });
  box.addEventListener('pointerup', e => {
    if (!start) return;
    const from = start, end = place(e), a = toData(...from), b = toData(...end), p = panels[0];
    start = null; band.style.display = 'none'; setTimeout(() => box.focus({ preventScroll: true }), 0);
    if (!a || !b) return;
    if (!pan && isUpright(from, end)) {
      return send('lifted', { range: [Math.min(a.y, b.y), Math.max(a.y, b.y)], n: ++count });
    }
    if (Math.abs(end[0] - from[0]) <= 0.005) return click({ ...b, finding: flagAt(...end) });
    const away = (end[0] - from[0]) / p.width * (p.x1 - p.x0);
    if (pan) brush([p.x0 - away, p.x1 - away]); else brush([Math.min(a.x, b.x), Math.max(a.x, b.x)]);
  });
  box.addEventListener('dblclick', () => brush([]));
  box.addEventListener('wheel', e => {
    if (!(e.ctrlKey || e.altKey) || !panels[0]) return; // a plain wheel scrolls the page
    e.preventDefault();
    const at = toData(...place(e)), p = panels[0], now = wheel ? wheel.range : [p.x0, p.x1];
    const factor = e.deltaY < 0 ? 0.8 : 1.25;
    const range = now.map(edge => at.x + (edge - at.x) * factor);
    if (wheel) clearTimeout(wheel.timer);
    wheel = { range, timer: setTimeout(() => { wheel = null; brush(range); }, 60) };
  }, { passive: false });
  box.addEventListener('keydown', e => {
    const p = panels[0];
    if (!p) return;
    const at = model.get('cursor') ?? (p.x0 + p.x1) / 2, wide = p.x1 - p.x0, near = (f) => [at - wide * f, at + wide * f];
    const away = (e.key === 'ArrowLeft' ? -1 : 1) * wide * (e.shiftKey ? 0.1 : 0.01);
    if (e.key === 'ArrowLeft' || e.key === 'ArrowRight') send('cursor', Math.min(p.x1, Math.max(p.x0, at + away)));
    else if (e.key === 'Enter') click({ x: at, y: null, panel: 0 });
    else if (e.key === '+' || e.key === '=') brush(near(0.25));
    else if (e.key === '-') brush(near(1));
    else if (e.key === 'Escape') brush([]);
    else if (e.key === 'z' || e.key === 'Z') ask('undo');
    else if (e.key === 'y' || e.key === 'Y') ask('redo');
    else return;
    e.preventDefault(); e.stopPropagation();
  });
  const cursor = () => {
    const p = panels[0], at = model.get('cursor');
    if (!p || at === null) return;
    hair.style.display = 'block'; hair.style.left = toShare(p, at) * 100 + '%';
    read(toShare(p, at), p.top + p.height / 2);
  };
  // the line of the selected place, where the picture shows it
  const choose = () => {
    const p = panels[0], at = model.get('chosen');
    const isSeen = p && at !== null && at >= p.x0 && at <= p.x1;
    chosen.style.display = isSeen ? 'block' : 'none';
    if (isSeen) chosen.style.left = toShare(p, at) * 100 + '%';
  };
  const ground = () => send('dark', document.body.dataset.jpThemeLight === 'false');
  const watch = new MutationObserver(ground);
  watch.observe(document.body, { attributes: true, attributeFilter: ['data-jp-theme-light'] });
  const wider = new ResizeObserver(() => requestAnimationFrame(paint));
  wider.observe(box);
  model.on('change:png', draw); model.on('change:sheet', draw); model.on('change:panels', () => { take(); hide(); paint(); choose(); });
  model.on('change:cursor', cursor); model.on('change:chosen', choose);
  model.on('change:legend', list); model.on('change:hidden', list);
  take(); draw(); list(); ground(); paint(); choose();
  return () => { watch.disconnect(); wider.disconnect(); if (url) URL.revokeObjectURL(url); };
}
export default { render };
