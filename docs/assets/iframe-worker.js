// Browsers refuse workers to pages that were opened from a disk: there the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        inside.document.body.append(script);
      });
      this.postMessage = (data) =>
        this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
