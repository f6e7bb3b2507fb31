// Exports the whole graph as a standalone SVG with inlined colours.

const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity",
  "fill-opacity", "stroke-opacity", "font-size", "font-weight", "font-family", "text-anchor",
  "dominant-baseline"];

function svgFile(world, scene) {
  const file = svgElement(null, "svg", {
    xmlns: SVG, width: scene.width, height: scene.height,
    viewBox: `0 0 ${scene.width} ${scene.height}`,
  });
  const paper = getComputedStyle(world.ownerSVGElement.parentElement).backgroundColor;
  svgElement(file, "rect", { width: "100%", height: "100%", fill: plainColour(paper) });
  const defs = world.ownerSVGElement.querySelector("defs").cloneNode(true);
  copyLooks(world.ownerSVGElement.querySelector("defs"), defs);
  const copy = world.cloneNode(true);
  copyLooks(world, copy);
  copy.removeAttribute("transform");
  file.append(defs, copy);
  return new XMLSerializer().serializeToString(file);
}

function copyLooks(from, to) {
  const originals = [from, ...from.querySelectorAll("*")];
  const copies = [to, ...to.querySelectorAll("*")];
  originals.forEach((original, i) => {
    const copy = copies[i];
    const style = getComputedStyle(original);
    if (style.display === "none") return copy.remove();
    for (const look of LOOKS) {
      const value = style.getPropertyValue(look);
      if (value) copy.setAttribute(look, plainColour(value));
    }
    const place = /translate\((-?[\d.]+)px, (-?[\d.]+)px\)/.exec(original.style?.transform);
    copy.removeAttribute("style");
    for (const name of ["class", "tabindex", "role"]) copy.removeAttribute(name);
    if (place) copy.setAttribute("transform", `translate(${place[1]} ${place[2]})`);
  });
}

// Drawing programs do not support `color(srgb r g b / a)`, which browsers return for color-mix.
function plainColour(value) {
  const mixed = /^color\(srgb ([\d.e-]+) ([\d.e-]+) ([\d.e-]+)(?: \/ ([\d.e-]+))?\)$/.exec(value);
  if (!mixed) return value;
  const [r, g, b] = mixed.slice(1, 4).map((part) => Math.round(255 * Number(part)));
  return mixed[4] === undefined ? `rgb(${r}, ${g}, ${b})` : `rgba(${r}, ${g}, ${b}, ${mixed[4]})`;
}

const LARGEST = 8192; // maximum pixels per side; browsers refuse much larger images

// Exports a PNG at twice the screen resolution, or less if that is too large.
async function picture(svg, { width, height }) {
  const scale = Math.min(2, LARGEST / Math.max(width, height));
  const sheet = document.createElement("canvas");
  Object.assign(sheet, { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
  const drawn = new Image();
  drawn.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  await drawn.decode();
  sheet.getContext("2d").drawImage(drawn, 0, 0, sheet.width, sheet.height);
  URL.revokeObjectURL(drawn.src);
  return new Promise((resolve) => sheet.toBlob(resolve, "image/png"));
}
