// Line charts of the last minutes, as SVG.

const NAMESPACE = "http://www.w3.org/2000/svg";
const LEFT = 54, RIGHT = 6, TOP = 8, BOTTOM = 18, HEIGHT = 150;
const GAP = 20; // seconds without a point that break a line

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The smallest round number that is at least `value`.
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((nice) => nice >= value * 0.999999);
}

export class Chart {
  // series: [{name, of: point -> number or null}]; format: number -> text; floor: the least that the axis shows.
  constructor(parent, { title, unit, series, format, floor }) {
    Object.assign(this, { title, series, format, floor, points: [], minutes: 10, cursor: null });
    this.values = series.map(() => element("span"));
    const legend = element("div", { class: "legend" }, ...series.map(({ name }, index) =>
      element("span", {}, element("span", { class: `key series-${index + 1}` }),
        element("span", { class: "name" }, `${name} `), this.values[index])));
    this.svg = shape("svg", { role: "img", "aria-label": title });
    parent.append(element("div", { class: "card chart" },
      element("div", { class: "head" }, element("h2", {}, title), element("span", { class: "unit" }, unit), legend),
      this.svg));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  // points: of the last `minutes` at most, in order. Of a short history only the part that there is gets drawn.
  show(points, minutes) {
    this.points = points;
    const age = points.length ? (points.at(-1).t - points[0].t) / 60 : 0;
    this.minutes = [1, 2, 5].find((span) => span >= age && span < minutes) ?? minutes;
    this.draw();
  }

  point(event) {
    const now = this.points.at(-1)?.t;
    if (now === undefined) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const time = now - (1 - (x - LEFT) / (this.width() - LEFT - RIGHT)) * this.minutes * 60;
    const distance = (point) => Math.abs(point.t - time);
    this.cursor = this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best)).t;
    this.draw();
  }

  width() {
    return this.svg.clientWidth || 320;
  }

  draw() {
    const width = this.width();
    const now = this.points.at(-1)?.t ?? 0;
    const seconds = this.minutes * 60;
    const numbers = this.points.flatMap((point) => this.series.map(({ of }) => of(point) ?? 0));
    const top = niceCeiling(Math.max(this.floor, ...numbers));
    const x = (time) => LEFT + (1 - (now - time) / seconds) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const level = y(share * top);
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: level, y2: level }));
      parts.push(shape("text", { x: LEFT - 7, y: level + 4, "text-anchor": "end" }, this.format(share * top)));
    }
    parts.push(shape("text", { x: LEFT, y: HEIGHT - 3 }, `${this.minutes} min ago`));
    parts.push(shape("text", { x: width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
    this.series.forEach(({ of }, index) => {
      parts.push(shape("path", { class: `line series-${index + 1}`, d: this.path(of, x, y) }));
    });
    const shown = this.points.find((point) => point.t === this.cursor) ?? this.points.at(-1);
    if (this.cursor !== null && shown) {
      parts.push(shape("line", { class: "cursor", x1: x(shown.t), x2: x(shown.t), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
    const texts = this.series.map(({ of }) => {
      const value = shown ? of(shown) : null;
      return value === null || value === undefined ? "–" : this.format(value);
    });
    texts.forEach((text, index) => { this.values[index].textContent = text; });
    this.svg.setAttribute("aria-label",
      `${this.title}: ${this.series.map(({ name }, index) => `${name} ${texts[index]}`).join(", ")}`);
  }

  path(of, x, y) {
    let path = "", before = null;
    for (const point of this.points) {
      const value = of(point);
      if (value === null || value === undefined) { before = null; continue; }
      const joined = before !== null && point.t - before < GAP;
      // A lone point is a dot: a line of no length with round ends.
      path += `${joined ? "L" : "M"}${x(point.t).toFixed(1)} ${y(value).toFixed(1)}${joined ? "" : "h0"}`;
      before = point.t;
    }
    return path;
  }
}
