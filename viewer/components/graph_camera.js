// Pan and zoom: maps scene units to pixels of the stage.

const ZOOM_MAX = 2.5;
const FIT_MAX = 1.15; // limit for small graphs
const READABLE = 0.6; // minimum zoom of the first view, where possible
const FAR = 0.58; // below this zoom, groups have labels instead of boxes
const START = 0.9; // zoom of the first view if it shows only a part

class Camera {
  constructor(changed) {
    this.changed = changed; // called once per frame with movement
    this.due = null;
    this.k = 1;
    this.x = 0;
    this.y = 0;
    this.size = { width: 0, height: 0 };
    this.inset = { top: 12, right: 16, bottom: 8, left: 16 }; // space for bands
    this.scene = { width: 1, height: 1 };
    this.auto = true; // not moved by the user yet
    this.frame = null;
  }

  get inner() {
    const { top, right, bottom, left } = this.inset;
    return {
      x: left, y: top,
      width: Math.max(1, this.size.width - left - right),
      height: Math.max(1, this.size.height - top - bottom),
    };
  }

  // The part of the scene on the stage.
  get view() {
    const { k, x, y, size } = this;
    return { left: -x / k, top: -y / k, right: (size.width - x) / k, bottom: (size.height - y) / k };
  }

  get fitZoom() {
    const { width, height } = this.inner;
    return Math.min(FIT_MAX, width / this.scene.width, height / this.scene.height);
  }

  get fits() {
    const { x, y, width, height } = this.inner;
    const right = this.x + this.scene.width * this.k;
    const bottom = this.y + this.scene.height * this.k;
    return this.x >= x - 2 && this.y >= y - 2 && right <= x + width + 2 && bottom <= y + height + 2;
  }

  moveTo({ k, x, y }, smooth = false) {
    cancelAnimationFrame(this.frame);
    const from = { k: this.k, x: this.x, y: this.y };
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (!smooth || still) return this.set(k, x, y);
    const start = performance.now();
    const tick = (now) => {
      const t = Math.min(1, (now - start) / 180);
      const e = 1 - (1 - t) ** 3;
      this.set(from.k + (k - from.k) * e, from.x + (x - from.x) * e, from.y + (y - from.y) * e);
      if (t < 1) this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  set(k, x, y) {
    Object.assign(this, { k, x, y });
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      this.changed();
    });
  }

  fit(smooth = false) {
    const k = this.fitZoom;
    const { x, y, width, height } = this.inner;
    const left = x + (width - this.scene.width * k) / 2;
    this.moveTo({ k, x: left, y: y + (height - this.scene.height * k) / 2 }, smooth);
    this.auto = true;
  }

  // Sets the first view: the whole graph if it is readable, or else a readable part around `box`.
  start(box) {
    if (this.fitZoom >= READABLE || !box) return this.fit();
    const { x, y, width, height } = this.inner;
    const k = Math.min(START, Math.max(READABLE, height / this.scene.height));
    const along = (from, extent, length, middle) => length <= extent
      ? from + (extent - length) / 2
      : Math.min(from, Math.max(from + extent - length, from + extent / 2 - middle));
    this.moveTo({
      k,
      x: along(x, width, this.scene.width * k, (box.x + box.w / 2) * k),
      y: along(y, height, this.scene.height * k, (box.y + box.h / 2) * k),
    });
    this.auto = true;
  }

  centre(box, smooth = true) {
    const { x, y, width, height } = this.inner;
    const k = Math.max(this.k, START);
    const left = x + width / 2 - (box.x + box.w / 2) * k;
    this.moveTo({ k, x: left, y: y + height / 2 - (box.y + box.h / 2) * k }, smooth);
    this.auto = false;
  }

  // Moves as little as possible to show the box with some margin.
  reveal(box) {
    const { x, y, width, height } = this.inner;
    const room = (start, length, from, extent) => {
      const margin = Math.min(60, Math.max(0, (extent - length) / 2));
      if (start < from + margin) return from + margin - start;
      if (start + length > from + extent - margin) return from + extent - margin - start - length;
      return 0;
    };
    const dx = room(this.x + box.x * this.k, box.w * this.k, x, width);
    const dy = room(this.y + box.y * this.k, box.h * this.k, y, height);
    if (dx || dy) this.moveTo({ k: this.k, x: this.x + dx, y: this.y + dy }, true);
  }

  zoom(factor, at = null) {
    const lowest = Math.min(0.3, this.fitZoom * 0.8);
    const k = Math.min(ZOOM_MAX, Math.max(lowest, this.k * factor));
    const px = at ? at.x : this.size.width / 2;
    const py = at ? at.y : this.size.height / 2;
    const scale = k / this.k;
    this.auto = false;
    cancelAnimationFrame(this.frame);
    this.set(k, px - (px - this.x) * scale, py - (py - this.y) * scale);
  }

  pan(dx, dy) {
    this.auto = false;
    cancelAnimationFrame(this.frame);
    this.set(this.k, this.x + dx, this.y + dy);
  }
}
