/** What there is to say of a session, in words. Pure. */

/** Where a session stands: {state, generator, generation} -> a few words. */
export function turns({ state, generator }) {
  if (state === "naming") return Number.isInteger(generator) ? `Rank ${generator} makes its identity` : "Its identity is made";
  return { none: "None yet", joining: "Ranks are joining", live: "Live", broken: "Broken; another follows" }[state] ?? String(state);
}

/** By which way ranks talk, like ones together: {0: "gloo on lo", 1: "gloo on lo"} -> [["gloo on lo", "r0 r1"]]. */
export function talk(transports) {
  const ways = new Map();
  const ranks = Object.keys(transports ?? {}).map(Number);
  for (const rank of ranks.sort((a, b) => a - b)) {
    const way = transports[rank];
    ways.set(way, [...(ways.get(way) ?? []), rank]);
  }
  return [...ways].map(([way, members]) => [way, stretches(members)]);
}

/** Numbers in rising order, with neighbours drawn together: [0, 1, 2, 5] -> "r0 to r2, r5". */
function stretches(numbers) {
  const found = [];
  for (const number of numbers) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  const told = ([first, last]) => (first === last ? `r${first}` : `r${first}${last === first + 1 ? "," : " to"} r${last}`);
  return found.map(told).join(", ");
}
