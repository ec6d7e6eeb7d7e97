function render({ model, el }) {
  el.classList.add('stl-figure');
  const box = document.createElement('div'); box.tabIndex = 0; box.setAttribute('role', 'application'); box.dataset.lmSuppressShortcuts = 'true';
  const img = document.createElement('img'); img.draggable = false;
  const band = document.createElement('div'); band.className = 'stl-band';
  const hair = document.createElement('div'); hair.className = 'stl-hair';
  box.append(img, band, hair); el.append(box);
  let start = null, url = null;
  const panels = () => model.get('panels') || [];
  const draw = () => {
    const png = model.get('png');
    const bytes = png instanceof DataView ? new Uint8Array(png.buffer, png.byteOffset, png.byteLength) : new Uint8Array(0);
    if (url) URL.revokeObjectURL(url);
    url = bytes.length ? URL.createObjectURL(new Blob([bytes], { type: 'image/png' })) : null;
    if (url) img.src = url; else img.removeAttribute('src');
    img.alt = model.get('alt'); box.setAttribute('aria-label', model.get('alt') + ' Arrow keys move the cursor, Enter selects, plus and minus zoom, Escape shows everything.');
  };
  const place = (event) => {
    const r = img.getBoundingClientRect();
    return [(event.clientX - r.left) / r.width, (event.clientY - r.top) / r.height];
  };
  const toData = (fx, fy) => {
    const i = panels().findIndex(p => fy >= p.top - 0.02 && fy <= p.top + p.height + 0.02);
    const p = panels()[i < 0 ? 0 : i]; if (!p) return null;
    const u = Math.min(1, Math.max(0, (fx - p.left) / p.width)), v = Math.min(1, Math.max(0, 1 - (fy - p.top) / p.height));
    const y = p.log ? p.y0 * Math.pow(p.y1 / p.y0, v) : p.y0 + v * (p.y1 - p.y0);
    return { x: p.x0 + u * (p.x1 - p.x0), y, panel: i };
  };
  const send = (name, value) => { model.set(name, value); model.save_changes(); };
  let count = 0; // a gesture that repeats the one before it is sent too
  const click = (x, y) => send('clicked', { x, y, n: ++count });
  const brush = (range) => send('brushed', { range, n: ++count });
  box.addEventListener('pointerdown', e => { if (e.button === 0) { start = place(e); box.setPointerCapture(e.pointerId); box.focus({ preventScroll: true }); } });
  box.addEventListener('pointermove', e => {
    const [fx] = place(e);
    hair.style.display = 'block'; hair.style.left = fx * 100 + '%';
    if (!start) return;
    band.style.display = Math.abs(fx - start[0]) > 0.005 ? 'block' : 'none';
    band.style.left = Math.min(fx, start[0]) * 100 + '%'; band.style.width = Math.abs(fx - start[0]) * 100 + '%';
  });
  box.addEventListener('pointerleave', () => { hair.style.display = 'none'; });
  box.addEventListener('pointerup', e => {
    if (!start) return;
    const end = place(e), a = toData(...start), b = toData(...end); const moved = Math.abs(end[0] - start[0]) > 0.005;
    start = null; band.style.display = 'none'; setTimeout(() => box.focus({ preventScroll: true }), 0);
    if (!a || !b) return;
    if (moved) brush([Math.min(a.x, b.x), Math.max(a.x, b.x)]); else click(b.x, b.y);
  });
  box.addEventListener('dblclick', () => brush([]));
  box.addEventListener('keydown', e => {
    const p = panels()[0]; if (!p) return;
    const at = model.get('cursor') ?? (p.x0 + p.x1) / 2, wide = p.x1 - p.x0, near = (f) => [at - wide * f, at + wide * f];
    if (e.key === 'ArrowLeft' || e.key === 'ArrowRight') send('cursor', Math.min(p.x1, Math.max(p.x0, at + (e.key === 'ArrowLeft' ? -1 : 1) * wide * (e.shiftKey ? 0.1 : 0.01))));
    else if (e.key === 'Enter') click(at, null);
    else if (e.key === '+' || e.key === '=') brush(near(0.25));
    else if (e.key === '-') brush(near(1));
    else if (e.key === 'Escape') brush([]);
    else return;
    e.preventDefault(); e.stopPropagation();
  });
  const cursor = () => {
    const p = panels()[0], at = model.get('cursor'); if (!p || at === null) return;
    hair.style.display = 'block'; hair.style.left = (p.left + (at - p.x0) / (p.x1 - p.x0) * p.width) * 100 + '%';
  };
  const ground = () => send('dark', document.body.dataset.jpThemeLight === 'false');
  const watch = new MutationObserver(ground); watch.observe(document.body, { attributes: true, attributeFilter: ['data-jp-theme-light'] });
  model.on('change:png', draw); model.on('change:cursor', cursor); draw(); ground();
  return () => { watch.disconnect(); if (url) URL.revokeObjectURL(url); };
}
export default { render };
