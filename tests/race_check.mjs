// Evaluate the race's pure functions on the data of a page, for tests/test_race.py to judge.
// Standard input: the page's JSON. Standard output: every race on both clocks, as JSON.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const { timeline, stateAt, train } = createRequire(import.meta.url)("../docs/_static/race.js");
const data = JSON.parse(readFileSync(0, "utf8"));
const SAMPLES = 400;

const races = data.cells.flatMap(({ M, N, dtype, recording }, index) =>
  ["forward", "backward"].flatMap((pass) =>
    [false, true].map((byBytes) => {
      const line = timeline(data, index, pass, byBytes);
      const lanes = line.lanes.map((lane) => ({
        ...lane,
        atEnds: lane.kernels.map((kernel) => stateAt(lane, kernel.end).moved),
        atMiddles: lane.kernels.map((k) => stateAt(lane, (k.start + k.end) / 2).index),
        moved: Array.from({ length: SAMPLES + 1 }, (_, i) =>
          stateAt(lane, (line.end * i) / SAMPLES).moved),
        finished: stateAt(lane, line.end).kernel === null,
        trains: lane.kernels.flatMap(({ reads, writes }) =>
          [reads, writes].map((side) => [0, 0.5, 1].map((f) => train(side, f, line.unit)))),
      }));
      return { ...line, M, N, dtype, pass, byBytes, recording: data.recordings[recording], lanes };
    })));
process.stdout.write(JSON.stringify(races));
