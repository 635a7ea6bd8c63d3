/** Where each rank's time went: compute, data, wait, reduce. Pure sums over the rounds. */

export const PARTS = [
  ["compute", "Compute", "forward, backward and the optimizer's step"],
  ["data", "Data", "waiting for and collating batches"],
  ["wait", "Wait", "idle until the others had finished their allotment"],
  ["reduce", "Reduce", "packing, averaging over the network and loading"],
];

/** By rank {compute, data, wait, reduce, total} in seconds over the last `last` rounds; ranks without work left out. */
export function splitOf(rounds, last) {
  const sums = new Map();
  for (const row of rounds.slice(-last)) {
    for (const [rank, planned] of Object.entries(row.planned ?? {})) {
      if (!planned) continue;
      const sum = sums.get(Number(rank)) ?? { compute: 0, data: 0, wait: 0, reduce: 0, total: 0 };
      sum.compute += row.compute_seconds?.[rank] ?? 0;
      sum.data += row.data_seconds?.[rank] ?? 0;
      sum.wait += row.wait_seconds?.[rank] ?? 0;
      sum.reduce += row.reduce_seconds ?? 0;
      sum.total = sum.compute + sum.data + sum.wait + sum.reduce;
      sums.set(Number(rank), sum);
    }
  }
  return sums;
}

/** The one sentence: who waits most and how much of all rank time is spent computing. */
export function verdict(sums, percent) {
  const all = [...sums.values()].reduce((a, s) => ({ compute: a.compute + s.compute, total: a.total + s.total }), {
    compute: 0,
    total: 0,
  });
  if (!all.total) return "";
  const [rank, most] = [...sums].reduce((a, b) => (b[1].wait / b[1].total > a[1].wait / a[1].total ? b : a));
  const share = most.wait / most.total;
  const waiting =
    share < 0.02 ? "nobody waits for anybody to speak of" : `rank ${rank} waits most, ${percent(share)} of its time`;
  return `${percent(all.compute / all.total)} of all rank time is compute; ${waiting}.`;
}
