// The call that makes what is shown: a button copies it, and it can be read below.
const HELD = 1500; // milliseconds that the button says what it has done

const select = (element) => {
  const range = document.createRange(), chosen = getSelection();
  range.selectNodeContents(element);
  chosen.removeAllRanges();
  chosen.addRange(range);
};

// whether the text lies on the clipboard; a page without a certificate has no clipboard of its own
const copy = async (text, fold, shown) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    fold.open = true; // what is folded away cannot be selected
    select(shown);
    return document.execCommand('copy');
  }
};

function render({ model, el }) {
  const line = document.createElement('div'); // the page decides itself whether `el` is seen
  line.className = 'stl-call';
  el.dataset.lmSuppressShortcuts = 'true';
  const button = document.createElement('button'), fold = document.createElement('details');
  const head = document.createElement('summary'), shown = document.createElement('pre');
  button.type = 'button';
  button.setAttribute('aria-live', 'polite');
  head.textContent = 'The call that makes this';
  fold.append(head, shown);
  line.append(button, fold);
  el.append(line);
  const rest = () => { button.textContent = 'Copy the call'; };
  button.addEventListener('click', async () => {
    const done = await copy(model.get('call'), fold, shown);
    button.textContent = done ? 'Copied' : 'Press Ctrl+C';
    setTimeout(rest, HELD);
  });
  const draw = () => {
    shown.textContent = model.get('call');
    line.style.display = model.get('call') ? '' : 'none';
  };
  model.on('change:call', draw);
  rest();
  draw();
}
export default { render };
