// Small charts of the last minute: one line, its area, and a value under the pointer. SVG, no library.

import { h, svg } from "./dom.js";

const WIDTH = 280;
const HEIGHT = 44;
const WINDOW_S = 60;

/** A line over time. `pick(sample)` gives a number or null (a gap); `format` writes it; `limit(sample)` is a dashed line. */
export class Sparkline {
  constructor(label, { pick, format, max = null, limit = null }) {
    Object.assign(this, { label, pick, format, max, limit });
    this.value = h("span", { class: "chart-value" });
    this.area = svg("path", { class: "chart-area" });
    this.line = svg("path", { class: "chart-line" });
    this.bound = svg("path", { class: "chart-limit" });
    this.cursor = svg("line", { class: "chart-cursor", y1: "0", y2: String(HEIGHT), visibility: "hidden" });
    this.picture = svg(
      "svg",
      { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      this.area,
      this.line,
      this.bound,
      this.cursor,
    );
    this.top = h("span", { class: "chart-top", "aria-hidden": "true" });
    this.element = h("div", { class: "chart-box" }, h("div", { class: "chart-head" }, h("span", { text: label }), this.value), h("div", { class: "chart-frame" }, this.picture, this.top));
    this.pointer = null; // x in the chart, while the pointer is over it
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      this.pointer = ((event.clientX - box.left) / box.width) * WIDTH;
      this.draw(this.samples || []);
    });
    this.picture.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.draw(this.samples || []);
    });
  }

  draw(samples) {
    this.samples = samples;
    const now = samples.at(-1)?.time ?? 0;
    const points = samples
      .map((sample) => ({ x: WIDTH - ((now - sample.time) / WINDOW_S) * WIDTH, y: this.pick(sample), limit: this.limit ? this.limit(sample) : null }))
      .filter((point) => point.x >= 0);
    const values = points.map((point) => point.y).filter((y) => y !== null);
    const top = this.max ?? (Math.max(...points.map((point) => point.limit ?? 0), ...values, 0) * 1.15 || 1);
    const place = (y) => HEIGHT - 2 - (Math.min(y, top) / top) * (HEIGHT - 4);
    let line = "";
    let area = "";
    let open = null;
    let last = null;
    for (const { x, y } of [...points, { x: 0, y: null }]) {
      if (y === null) {
        if (open !== null) area += `L${last.toFixed(1)} ${HEIGHT}L${open.toFixed(1)} ${HEIGHT}Z`;
        open = null;
        continue;
      }
      const at = `${x.toFixed(1)} ${place(y).toFixed(1)}`;
      line += open === null ? `M${at}` : `L${at}`;
      area += open === null ? `M${at}` : `L${at}`;
      open ??= x;
      last = x;
    }
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    let bound = "";
    points.forEach((point, i) => {
      if (point.limit !== null) bound += `${i && points[i - 1].limit !== null ? "L" : "M"}${point.x.toFixed(1)} ${place(point.limit).toFixed(1)}`;
    });
    this.bound.setAttribute("d", bound);
    this.showValue(points);
    this.top.textContent = this.max === null && !this.limit && values.some((y) => y > 0) ? this.format(top) : "";
  }

  showValue(points) {
    const shown = this.pointer === null ? points.at(-1) : points.reduce((best, point) => (Math.abs(point.x - this.pointer) < Math.abs(best.x - this.pointer) ? point : best), points[0] || { x: 0, y: null });
    const text = this.format(shown?.y ?? null);
    this.value.textContent = text;
    this.picture.setAttribute("aria-label", `${this.label}: ${text}, over the last minute`);
    this.cursor.setAttribute("visibility", this.pointer === null ? "hidden" : "visible");
    if (this.pointer !== null && shown) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, shown.x.toFixed(1));
  }
}
