// A round's tree: the drafts, and the path that the model accepted.

import { ORIGINS } from "./answer.js";
import { svg } from "./svg.js";

const ROW = 28;
const BOX = 22;
const GAP = 16; // between columns
const LETTER = 7.3;
const LONGEST = 11; // letters of a node

/** Draw a round into a container. */
export function drawTree(container, round) {
  const nodes = placed(round);
  const bottom = Math.max(...nodes.map((node) => node.row)) + 1;
  const columns = columnsOf(nodes);
  const width = columns.at(-1).left + columns.at(-1).width + 2;
  const height = bottom * ROW + 4;
  const drawing = svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": described(round),
  });
  for (const node of nodes) if (node.parent !== null) drawing.append(edge(nodes[node.parent], node, columns));
  for (const node of nodes) drawing.append(box(node, columns));
  container.replaceChildren(drawing);
  container.scrollTo(0, 0);
}

/** What a round was, in a sentence. */
export function described({ tokens, path, said }) {
  const guessed = tokens.length - 1;
  const accepted = Math.min(path.length - 1, said.length);
  if (!guessed) return "Nothing was guessed; the model said one token.";
  const own = said.length > accepted ? ", then the model's own" : "";
  return `${guessed} guessed, ${accepted} accepted${own}: ${said.map(shown).join(" ")}`;
}

/** Nodes with depth and row; the accepted path is the first row, the model's own token at its end. */
function placed({ tokens, parents, origins, path, said }) {
  const onPath = new Set(path.slice(0, said.length + 1));
  const nodes = tokens.map((text, index) => ({
    text, origin: origins[index], parent: index ? parents[index] : null, isAccepted: onPath.has(index), children: [],
  }));
  if (said.length === path.length) {
    nodes.push({ text: said.at(-1), origin: "bonus", parent: path.at(-1), isAccepted: true, children: [] });
  }
  nodes.forEach((node, index) => {
    node.depth = node.parent === null ? 0 : nodes[node.parent].depth + 1;
    if (node.parent !== null) nodes[node.parent].children.push(index);
  });
  let row = 0;
  const walk = (index) => {
    const node = nodes[index];
    node.row = row;
    node.children.sort((left, right) => nodes[right].isAccepted - nodes[left].isAccepted);
    node.children.forEach((child, place) => {
      if (place) row += 1;
      walk(child);
    });
  };
  walk(0);
  return nodes;
}

function columnsOf(nodes) {
  const columns = [];
  for (const node of nodes) {
    const letters = Math.min(LONGEST, Math.max(1, shown(node.text).length));
    const column = (columns[node.depth] ??= { width: 0, left: 2 });
    column.width = Math.max(column.width, letters * LETTER + 12);
  }
  columns.forEach((column, depth) => {
    if (depth) column.left = columns[depth - 1].left + columns[depth - 1].width + GAP;
  });
  return columns;
}

function edge(from, to, columns) {
  const { left, width } = columns[from.depth];
  const [x1, y1] = [left + width, from.row * ROW + ROW / 2];
  const [x2, y2] = [columns[to.depth].left, to.row * ROW + ROW / 2];
  const middle = (x1 + x2) / 2;
  return svg("path", {
    class: `edge ${from.isAccepted && to.isAccepted ? "accepted" : "rejected"}`,
    d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
  });
}

function box(node, columns) {
  const { left, width } = columns[node.depth];
  const y = node.row * ROW + (ROW - BOX) / 2;
  const text = shown(node.text);
  const label = text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
  const fate = node.isAccepted ? "accepted" : "rejected";
  const origin = node.origin === "pending" ? "pending: said before" : ORIGINS[node.origin]?.name ?? node.origin;
  return svg(
    "g",
    { class: `node ${fate}`, "data-origin": node.origin },
    svg("title", {}, `${text}: ${origin}, ${fate}`),
    svg("rect", { x: left, y, width, height: BOX, rx: 5 }),
    svg("text", { x: left + width / 2, y: y + BOX / 2 + 4.5, "text-anchor": "middle" }, label),
  );
}

/** A token's text with its blanks to be seen. */
export function shown(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}
