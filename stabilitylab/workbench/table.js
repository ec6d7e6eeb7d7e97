// Tables of the kernel that the page sorts: a click on a heading sorts by it, another one turns the order round.
const numberOf = (text) => {
  const plain = text.replace(/,/g, '').replace(/%$/, '').trim().toLowerCase();
  if (plain === '') return null;
  if (plain === 'inf' || plain === '∞') return Infinity;
  if (plain === '-inf') return -Infinity;
  const value = Number(plain);
  return Number.isNaN(value) ? null : value;
};

// order of two cells: numbers by size, words by letters, empty cells last whatever the direction
const compare = (a, b, turn) => {
  const left = a.trim(), right = b.trim();
  if (!left || !right) return (left ? 0 : 1) - (right ? 0 : 1);
  const x = numberOf(left), y = numberOf(right);
  return turn * (x !== null && y !== null ? x - y : left.localeCompare(right));
};

function render({ model, el }) {
  el.classList.add('stl-sortable');
  let count = 0, chosen = []; // of every table: the heading by which it is sorted, and the direction
  const sort = (table, column, head, turn) => {
    const body = head.parentElement.parentElement, rows = [...body.rows].filter(row => row !== head.parentElement);
    rows.sort((a, b) => compare(a.cells[column]?.textContent || '', b.cells[column]?.textContent || '', turn));
    for (const other of head.parentElement.cells) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', turn > 0 ? 'ascending' : 'descending');
    body.append(...rows);
  };
  const turned = (table, column, head, place) => {
    const turn = head.getAttribute('aria-sort') === 'ascending' ? -1 : 1;
    sort(table, column, head, turn);
    chosen[place] = { words: head.textContent.trim(), turn };
  };
  const tell = (name) => {
    model.set('clicked', { name, n: ++count });
    model.save_changes();
  };
  const draw = () => {
    el.innerHTML = model.get('value'); // markup of the project's own templates, which escape what they are given
    const helps = model.get('helps') || {};
    [...el.querySelectorAll('table')].forEach((table, place) => {
      [...(table.rows[0]?.querySelectorAll('th') || [])].forEach((head, column) => {
        const words = head.textContent.trim();
        head.title = helps[words] ? words + ': ' + helps[words] : 'sort by ' + words;
        head.tabIndex = 0;
        head.addEventListener('click', () => turned(table, column, head, place));
        head.addEventListener('keydown', e => {
          if (e.key !== 'Enter' && e.key !== ' ') return;
          e.preventDefault(); e.stopPropagation();
          turned(table, column, head, place);
        });
        const known = chosen[place]; // rows that came later keep the order that was asked for
        if (known && known.words === words) sort(table, column, head, known.turn);
      });
      for (const row of [...table.rows].slice(1)) row.dataset.name ||= row.cells[0]?.textContent.trim() || '';
    });
    for (const element of el.querySelectorAll('[data-name]')) {
      element.tabIndex = 0;
      element.addEventListener('click', () => tell(element.dataset.name));
      element.addEventListener('keydown', e => {
        if (e.key !== 'Enter') return;
        e.preventDefault(); e.stopPropagation();
        tell(element.dataset.name);
      });
    }
  };
  model.on('change:value', draw);
  draw();
}
export default { render };
