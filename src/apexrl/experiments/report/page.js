"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "star", "hexagon", "triangle-down"];
  const hidden = new Set();
  const drawn = new Set();

  // plotly.js is stored compressed, which makes the page less than half as large.
  async function loadPlotly() {
    const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  // A custom property keeps light-dark(...) as text; an element's colour is what it comes to.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  function color(name, alpha = 1) {
    probe.style.color = `var(--${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${r},${g},${b},${alpha})`;
  }

  function dashOf(group) {
    const { dash } = data.groups[group];
    return dash === "none" ? "solid" : dash.split(" ").map((length) => `${length}px`).join(",");
  }

  function themedTrace(trace) {
    const { group, role } = trace.meta;
    const own = group === undefined ? "" : `c${data.groups[group].color}`;
    const styles = {
      mean: () => ({ line: { color: color(own), width: 2.2, dash: dashOf(group) }, marker: { color: color(own) } }),
      run: () => ({ line: { color: color(own, 0.3), width: 1 }, marker: { color: color(own, 0.3) } }),
      band: () => ({ fillcolor: color(own, 0.15), line: { width: 0 } }),
      evaluation: () => ({
        marker: { color: color("card"), size: 8, symbol: SYMBOLS[group % SYMBOLS.length], line: { color: color(own), width: 2 } },
        error_y: { ...trace.error_y, color: color(own), thickness: 1.4, width: 3 },
      }),
      bar: () => ({ marker: { color: color(own, 0.85) }, error_x: { ...trace.error_x, color: color("text"), thickness: 1.2, width: 3 } }),
      heat: () => ({ xgap: innerWidth < 600 ? 0 : 1, colorscale: [[0, color("bad")], [0.5, color("mid")], [1, color("good")]] }),
      part0: () => ({ marker: { color: color("part0") }, insidetextfont: { color: color("on-part") } }),
      part1: () => ({ marker: { color: color("part1") }, insidetextfont: { color: color("on-part") } }),
    };
    return { ...trace, ...styles[role](), visible: !hidden.has(group), showlegend: false };
  }

  function themedLayout(layout) {
    const axis = { gridcolor: color("grid"), zerolinecolor: color("rule"), linecolor: color("rule"), ticks: "" };
    return {
      ...layout,
      margin: { l: 48, r: 14, t: 12, b: 42, ...layout.margin },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("soft"), size: 12, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("rule"), font: { color: color("text") }, namelength: -1 },
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, automargin: true, ...layout.yaxis },
    };
  }

  function draw(div) {
    const figure = data.figures[div.dataset.figure];
    const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
    drawn.add(div);
    return Plotly.react(div, figure.data.map(themedTrace), themedLayout(figure.layout), config);
  }

  function toggle(button) {
    const group = Number(button.dataset.toggle);
    const isShown = hidden.delete(group);
    if (!isShown) hidden.add(group);
    button.setAttribute("aria-pressed", String(isShown));
    for (const element of document.querySelectorAll(`[data-group="${group}"]`)) element.classList.toggle("off", !isShown);
    drawn.forEach(draw);
  }

  function addCopyButton(block) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }

  async function start() {
    if (navigator.clipboard) document.querySelectorAll(".code").forEach(addCopyButton);
    try {
      await loadPlotly();
    } catch (error) {
      for (const div of document.querySelectorAll(".plot")) div.textContent = `This browser cannot render the plots: ${error.message}`;
      return;
    }
    document.querySelectorAll("[data-toggle]").forEach((button) => button.addEventListener("click", () => toggle(button)));
    for (const query of ["(prefers-color-scheme: dark)", "print"]) {
      matchMedia(query).addEventListener("change", () => drawn.forEach(draw));
    }
    for (const details of document.querySelectorAll("details")) {
      details.addEventListener("toggle", () => details.open && details.querySelectorAll(".plot").forEach(draw));
    }
    const plots = [...document.querySelectorAll(".plot")].filter((div) => !div.closest("details"));
    await Promise.all(plots.map(draw));
    document.documentElement.dataset.ready = "true";
  }

  start();
})();
