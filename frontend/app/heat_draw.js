/** Paints the heat map. It only ever writes to the canvas: reading one back is what makes canvases slow. */
import { cellOf, cellRect, epochStarts, ink, ramp } from "./heat.js";
import { colour } from "./theme.js";

const FOOT = 20;
const LABEL_ROOM = 64;

export function draw(canvas, { place, rounds, ranks, gone, most, dark, cursor }) {
  const scale = window.devicePixelRatio || 1;
  const height = place.height + FOOT;
  canvas.width = Math.round(place.width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const paint = {
    text: colour("--text-3"),
    strong: colour("--text"),
    empty: colour("--inset"),
    line: colour("--bad"),
    family: getComputedStyle(document.body).fontFamily,
  };
  const hatch = hatched(pen, paint);
  ranks.forEach((rank, row) => {
    // An empty lane, which the rounds fill from the right.
    pen.fillStyle = paint.empty;
    pen.fillRect(0, row * place.row, place.left - place.gap, place.row - place.gap);
    for (let column = 0; column < place.columns; column += 1) {
      const cell = cellOf(rounds[place.first + column], rank.rank, gone.get(rank.rank));
      drawCell(pen, {
        rect: cellRect(place, row, column),
        cell,
        most,
        dark,
        hatch,
        paint,
        newest: column === place.columns - 1,
      });
    }
  });
  drawFoot(pen, place, rounds, paint);
  if (cursor) drawCursor(pen, cellRect(place, cursor.row, cursor.column), paint);
}

function drawCell(pen, { rect, cell, most, dark, hatch, paint, newest }) {
  const { x, y, width, height } = rect;
  if (cell.dead || !cell.planned) {
    pen.fillStyle = cell.dead ? hatch : paint.empty;
    pen.fillRect(x, y, width, height);
    return;
  }
  const rgb = ramp(cell.planned / most, dark);
  pen.fillStyle = `rgb(${rgb.join(",")})`;
  pen.fillRect(x, y, width, height);
  if (cell.done < 1) {
    pen.fillStyle = paint.empty;
    pen.globalAlpha = 0.75;
    pen.fillRect(x, y, width, height * (1 - cell.done));
    pen.globalAlpha = 1;
  }
  if (cell.anchor && height > 5) {
    pen.fillStyle = ink(rgb);
    pen.fillRect(x, y + height - 3, width, 2);
  }
  if (!newest || height < 10) return;
  pen.fillStyle = cell.done < 0.6 ? paint.strong : ink(rgb);
  pen.font = `600 ${Math.min(13, height - 3)}px ${paint.family}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(String(cell.planned), x + width / 2, y + height / 2 - (cell.anchor ? 1 : 0));
}

/** Epoch marks and the first and last round numbers under the map, as far as they do not touch. */
function drawFoot(pen, place, rounds, paint) {
  if (!place.columns) return;
  pen.font = `11px ${paint.family}`;
  pen.textBaseline = "top";
  pen.fillStyle = paint.text;
  const y = place.height + 5;
  pen.textAlign = "right";
  pen.fillText(`round ${rounds.at(-1).round}`, place.width - 1, y);
  let free = place.left;
  pen.textAlign = "left";
  if (place.columns > 1) {
    pen.fillText(`${rounds[place.first].round}`, place.left, y);
    free += 30;
  }
  for (const index of epochStarts(rounds, place.first + 1)) {
    const x = place.left + (index - place.first) * place.cell;
    pen.fillRect(x - 1, place.height, 1, 6);
    if (x < free || x > place.width - LABEL_ROOM - place.lead - 20) continue;
    pen.fillText(`epoch ${rounds[index].epoch + 1}`, x + 2, y);
    free = x + LABEL_ROOM;
  }
}

function drawCursor(pen, { x, y, width, height }, paint) {
  pen.strokeStyle = paint.strong;
  pen.lineWidth = 2;
  pen.strokeRect(x, y, width, height);
}

function hatched(pen, paint) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ctx = tile.getContext("2d");
  ctx.strokeStyle = paint.line;
  ctx.lineWidth = 1.2;
  ctx.beginPath();
  for (const offset of [-6, 0, 6]) {
    ctx.moveTo(offset, 6);
    ctx.lineTo(offset + 6, 0);
  }
  ctx.stroke();
  return pen.createPattern(tile, "repeat");
}
