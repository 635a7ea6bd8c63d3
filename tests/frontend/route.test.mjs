import assert from "node:assert/strict";
import { test } from "node:test";
import { routeOf } from "../../frontend/app/route.js";

for (const [hash, wanted] of [
  ["", { page: "runs" }],
  ["#/", { page: "runs" }],
  ["#/runs/new", { page: "new" }],
  ["#/runs/12", { page: "run", id: 12 }],
  ["#/runs/12/x", { page: "runs" }],
  ["#ticket=abc", { page: "runs" }],
]) {
  test(`${hash || "no hash"} leads to ${wanted.page}`, () => assert.deepEqual(routeOf(hash), wanted));
}
