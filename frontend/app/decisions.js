/** ElChe's decisions as a log. Pure. */

const HEADINGS = { suppress_growth: "No growth", nudge_down: "Shorter window" };

/** What guard or meta-controller said against a round as {heading, text}; null when they were content. */
export function objection({ verdict, verdict_reason: reason }) {
  if (!verdict || verdict === "stable") return null;
  return { heading: HEADINGS[verdict] ?? verdict, text: reason ?? "" };
}

/** Decisions newest first; the same sentence again is counted, not repeated. An objection is never folded away. */
export function decisionLog(rounds) {
  const log = [];
  for (const row of rounds) {
    if (!row.decision) continue;
    const [last, against] = [log.at(-1), objection(row)];
    const again = last && last.text === row.decision && !last.against && !against;
    if (again) Object.assign(last, { to: row.round, times: last.times + 1 });
    else log.push({ from: row.round, to: row.round, text: row.decision, times: 1, against });
  }
  return log.reverse();
}
