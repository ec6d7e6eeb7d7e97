// On the search page: the symptoms that a query names, above the pages that have all of its words.
// The same rule as `symptom(words)` in stabilitylab.knowledge.symptoms; its tables are in symptom_words.js.
(() => {
  const { same, empty, endings, least, symptoms } = window.symptomWords;
  const stem = (word) => {
    const ending = endings.find((end) => word.endsWith(end) && word.length - end.length > 2);
    if (ending) word = word.slice(0, -ending.length);
    return word.length > 3 && word.endsWith("e") ? word.slice(0, -1) : word;
  };
  const wordsOf = (phrase) => {
    let text = ` ${(phrase.toLowerCase().match(/[\p{L}\p{N}_.×'\/%-]+/gu) || []).join(" ")} `;
    for (const [written, word] of same) text = text.replaceAll(` ${written} `, ` ${word} `);
    const words = text.replaceAll("_", " ").match(/[\p{L}\p{N}][\p{L}\p{N}.×]*/gu) || [];
    return new Set(words.filter((word) => !empty.includes(word)).map((word) => stem(word.replace(/\.+$/, ""))));
  };
  const indexed = symptoms.map((row) => {
    const phrases = row.phrases.map((words) => new Set(words));
    return { ...row, phrases, together: new Set(row.phrases.flat()) };
  });
  const weight = (words) =>
    [...words].reduce((sum, word) => {
      const used = indexed.filter((row) => row.together.has(word)).length;
      return sum + (used ? Math.log(1 + indexed.length / used) : 2);
    }, 0);
  const common = (a, b) => weight([...a].filter((word) => b.has(word)));
  const likeness = (words, { phrases, together }) => {
    const all = Math.max(weight(words), 1e-9);
    const alike = phrases.map((phrase) => (2 * common(words, phrase)) / (all + weight(phrase)));
    return Math.max(...alike) + (0.5 * common(words, together)) / all;
  };
  const show = () => {
    const query = new URLSearchParams(location.search).get("q");
    const place = document.getElementById("search-results");
    if (!query || !place) return;
    const words = wordsOf(query);
    const found = indexed
      .map((row) => [likeness(words, row), row])
      .filter(([score]) => score >= least)
      .sort((a, b) => b[0] - a[0])
      .slice(0, 3);
    if (!found.length) return;
    const list = document.createElement("ul");
    list.className = "search symptom-hits";
    for (const [, row] of found) {
      const item = list.appendChild(document.createElement("li"));
      const link = item.appendChild(document.createElement("a"));
      link.href = `symptoms/${row.kind}.html`;
      link.textContent = row.title;
      item.appendChild(document.createElement("p")).textContent = row.line;
    }
    const heading = document.createElement("h2");
    heading.textContent = "Symptoms";
    place.prepend(heading, list);
    // a page stands once: Sphinx lists it again for each of its phrases and headings
    const pageOf = (link) => link.getAttribute("href").replace(/[?#].*/, "");
    const once = () => {
      const listed = new Set();
      for (const link of place.querySelectorAll("li > a")) {
        link.parentElement.hidden = listed.has(pageOf(link));
        listed.add(pageOf(link));
      }
    };
    new MutationObserver(once).observe(place, { childList: true, subtree: true });
  };
  document.addEventListener("DOMContentLoaded", show);
})();
