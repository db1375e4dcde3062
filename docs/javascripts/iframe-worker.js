// A page that is opened as a file may start no worker: the search then runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      window.addEventListener("message", (event) => {
        if (event.source !== this.inside) return
        const message = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(message)
        this.onmessage?.(message)
      })
      const answer = "window.postMessage = (message) => parent.postMessage(message, '*')"
      this.inside.document.open() // drops handlers: `onload` comes after it
      this.inside.document.write(`<script>${answer}<\/script><script src="${url}"><\/script>`)
      this.inside.document.close()
      this.ready = new Promise((resolve) => (this.inside.onload = resolve))
    }
    postMessage(message) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(message) })))
    }
    terminate() {}
  }
}
