import assert from "node:assert/strict";
import { test } from "node:test";
import { talk, turns } from "../../frontend/app/sessions.js";

test("ranks that talk alike are told together, neighbours as a stretch", () => {
  const eth = "NCCL 2.28.9 on eth0";
  const ranks = { 10: eth, 0: eth, 1: eth, 2: "NCCL 2.28.9 on ens5", 3: eth };
  assert.deepEqual(talk(ranks), [
    [eth, "r0, r1, r3, r10"],
    ["NCCL 2.28.9 on ens5", "r2"],
  ]);
  assert.deepEqual(talk({}), []);
  assert.deepEqual(talk(undefined), []);
});

for (const [session, wanted] of [
  [{ state: "none", generator: null }, "None yet"],
  [{ state: "naming", generator: 0 }, "Rank 0 makes its identity"],
  [{ state: "naming", generator: null }, "Its identity is made"],
  [{ state: "joining", generator: 1 }, "Ranks are joining"],
  [{ state: "live", generator: 1 }, "Live"],
  [{ state: "broken", generator: 1 }, "Broken; another follows"],
  [{ state: "parting", generator: 1 }, "parting"],
]) {
  test(`a session that is ${session.state}`, () => assert.equal(turns(session), wanted));
}
