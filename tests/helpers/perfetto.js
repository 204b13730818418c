// Perfetto's trace processor behind standard input and output: node perfetto.js .../engine_bundle.js
//
// The bundle is that of Perfetto's user interface: a worker of a browser, which gets and sends the
// bytes of TraceProcessorRpcStream. What it uses of a browser is here.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const { stdin, argv } = process;
const bundle = argv[2];
const bytesOf = (name) => Uint8Array.from(fs.readFileSync(path.join(path.dirname(bundle), name)));
const port = { postMessage: (bytes) => fs.writeFileSync(1, bytes) };

delete globalThis.process; // where there is one the engine expects to be built for Node.js
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = Object;
globalThis.location = { href: `file://${bundle}` };
globalThis.XMLHttpRequest = class {
  status = 200;
  open(_, name) {
    this.name = name;
  }
  send() {
    this.response = bytesOf(this.name).buffer;
  }
};
console.log = console.warn = () => {}; // its progress

vm.runInThisContext(fs.readFileSync(bundle, "utf8"), { filename: bundle });
self.onmessage({ data: port });
stdin.on("data", (bytes) => port.onmessage({ data: Uint8Array.from(bytes) }));
