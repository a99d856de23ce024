// How often drafts were accepted, by their position after the pending token.

import { svg } from "./svg.js";

const [WIDTH, HEIGHT, TOP, BOTTOM] = [340, 150, 18, 20];
const MOST = 12; // positions that are shown
const TOPS = [0.1, 0.25, 0.5, 1]; // shares at which the scale may end

/** Draw the chart of an answer into a container. */
export function drawChart(container, answer) {
  const rounds = answer.rounds.length;
  const positions = answer.byPosition().slice(0, MOST);
  if (!positions.length) {
    container.replaceChildren(empty(rounds));
    return;
  }
  const most = Math.max(...positions.map(({ offered }) => offered)) / rounds;
  const top = TOPS.find((share) => share >= most) ?? 1;
  const scale = (HEIGHT - TOP - BOTTOM) / top;
  const step = Math.min(56, WIDTH / positions.length);
  const shares = positions.map(({ accepted }) => sum(Object.values(accepted)) / rounds);
  const told = shares.map((share, place) => `position ${place + 1}: ${percent(share)}`).join(", ");
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Accepted by ${told}` });
  drawing.append(svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  drawing.append(svg("text", { class: "scale", x: WIDTH, y: 10, "text-anchor": "end" }, `full height: ${percent(top)}`));
  positions.forEach(({ offered, accepted }, place) => {
    const x = place * step + step * 0.14;
    const width = step * 0.72;
    const outline = (offered / rounds) * scale;
    drawing.append(svg("rect", { class: "offered", x, y: HEIGHT - BOTTOM - outline, width, height: outline, rx: 2 }));
    let y = HEIGHT - BOTTOM;
    for (const [origin, count] of Object.entries(accepted)) {
      const height = (count / rounds) * scale;
      y -= height;
      const title = svg("title", {}, `position ${place + 1}, ${origin}: ${count} of ${rounds} rounds`);
      drawing.append(svg("rect", { class: "part", "data-origin": origin, x, y, width, height }, title));
    }
    const middle = { x: x + width / 2, "text-anchor": "middle" };
    drawing.append(svg("text", { ...middle, y: HEIGHT - 6 }, String(place + 1)));
    if (shares[place]) drawing.append(svg("text", { ...middle, class: "value", y: y - 4 }, percent(shares[place])));
  });
  container.replaceChildren(drawing);
}

function empty(rounds) {
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = rounds ? "Nothing was guessed." : "No round yet.";
  return note;
}

const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
const percent = (share) => `${Math.round(share * 100)}%`;
