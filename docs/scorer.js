// The scores of the site's search: Sphinx's own, except for `score`. Among pages with the same words, guides come
// before explanations and notebooks, and all of them before pages for contributors. A guide whose title has the
// query comes before sections and objects of that name.
var inTitle = (title) => {
  const query = new URLSearchParams(window.location.search).get("q") || "";
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const named = title.toLowerCase().split(/\W+/);
  return words.length > 0 && words.every((word) => named.includes(word) || named.includes(word + "s"));
};
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    if (/^docs\/(start|howto)\/[^/]+$/.test(page) && !anchor && inTitle(title)) score += 10;
    if (/^docs\/howto\/(migrate|troubleshoot)\//.test(page)) return score + 2;
    if (/^docs\/howto\/faq/.test(page)) return score;
    if (/^docs\/(start|howto)\//.test(page)) return score + 3;
    if (/^(docs\/explain|notebooks)\//.test(page)) return score + 1;
    if (/^(docs\/contribute\/|CONTRIBUTING|CHANGELOG)/.test(page)) return score - 12;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
