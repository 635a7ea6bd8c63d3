/** Addresses: `#/` all runs, `#/runs/new`, `#/runs/12`. Pure. Anything unknown is the list of runs. */
export function routeOf(hash) {
  const run = /^#\/runs\/(\d+)$/.exec(hash);
  if (run) return { page: "run", id: Number(run[1]) };
  return { page: hash === "#/runs/new" ? "new" : "runs" };
}
