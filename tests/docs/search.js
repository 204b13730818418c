// Searches the built site without a browser: node search.js SITE QUERY... prints {query: [page, ...]} as JSON, best first.
const fs = require("fs");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const element = { firstChild: null, removeChild() {} };
const page = {
  document: {
    documentElement: { dataset: { content_root: "./" } },
    readyState: "loading",
    addEventListener() {},
    getElementById: () => element,
  },
  DOCUMENTATION_OPTIONS: { FILE_SUFFIX: ".html", LINK_SUFFIX: ".html", URL_ROOT: "./" },
  URLSearchParams,
  _: (text) => text,
  _ready() {},
  SPHINX_HIGHLIGHT_ENABLED: false,
};
page.window = page;
vm.createContext(page);
for (const name of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf8").replace(/^const /gm, "var "), page);

const found = {};
for (const query of queries) {
  page.query = query;
  page.location = { search: `?q=${encodeURIComponent(query)}` };
  const results = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", page);
  found[query] = [...new Set(results.reverse().map((result) => result[0]))];
}
console.log(JSON.stringify(found));
