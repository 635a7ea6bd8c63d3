/** ElChe's decisions as a log. Pure. */

/** Decisions newest first; the same sentence again is counted, not repeated. */
export function decisionLog(rounds) {
  const log = [];
  for (const row of rounds) {
    if (!row.decision) continue;
    const last = log.at(-1);
    if (last && last.text === row.decision) Object.assign(last, { to: row.round, times: last.times + 1 });
    else log.push({ from: row.round, to: row.round, text: row.decision, times: 1 });
  }
  return log.reverse();
}
