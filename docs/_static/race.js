/* The race: three chains of kernels on one bus and one time axis. docs/_ext/race.py writes the page
   and the data. The first half is pure and is tested in node; the second draws it. */
(() => {
  "use strict";

  const PLAY_S = 12; // a whole race on screen at 1 x, whatever it takes on the GPU
  const STEP_S = 1; // from kernel to kernel where motion is reduced
  const BLOCK = 0.34; // share of the bus that an [M, N] tensor of x's dtype covers
  const SLIVER = 0.03; // and the least that any tensor does

  /* Lay out one race: kernels with their bytes and the seconds at which they begin and end. Where
     `byBytes`, time is bytes over the ceiling's bandwidth; else it is what was measured. */
  function timeline(data, cellIndex, pass, byBytes) {
    const cell = data.cells[cellIndex];
    const lanes = cell[pass].lanes.map((lane, i) => {
      const counts = data.bytes[lane.bytes][Symbol.iterator]();
      const take = (tensor) => ({ tensor, bytes: counts.next().value });
      const kernels = data.chains[lane.chain].map(([name, reads, writes]) => {
        const kernel = { name, reads: reads.map(take), writes: writes.map(take) };
        kernel.readBytes = sum(kernel.reads);
        kernel.bytes = kernel.readBytes + sum(kernel.writes);
        return kernel;
      });
      const bytes = sum(kernels);
      const end = byBytes ? bytes / cell[pass].bandwidth : lane.time;
      let moved = 0;
      let share = 0;
      kernels.forEach((kernel, k) => {
        kernel.before = moved;
        kernel.start = share * end;
        moved += kernel.bytes;
        share = byBytes || !lane.shares ? moved / bytes : share + lane.shares[k];
        kernel.end = k === kernels.length - 1 ? end : share * end;
      });
      return { name: data.lanes[i], kernels, bytes, end, profile: lane.profile };
    });
    const end = Math.max(...lanes.map((lane) => lane.end));
    const middles = lanes.flatMap((l) => l.kernels.map((k) => (k.start + k.end) / 2));
    const stops = [...new Set([0, ...middles, end])].sort((a, b) => a - b);
    const unit = Math.max(...lanes[lanes.length - 1].kernels[0].reads.map(({ bytes }) => bytes));
    return { lanes, end, stops, unit };
  }

  /* Say where a lane is at time t: its kernel (null once it has finished) and the bytes moved. */
  function stateAt(lane, t) {
    const index = lane.kernels.findIndex((kernel) => t < kernel.end);
    if (index < 0) return { index: lane.kernels.length, kernel: null, fraction: 1, moved: lane.bytes };
    const kernel = lane.kernels[index];
    const fraction = Math.max(0, t - kernel.start) / (kernel.end - kernel.start);
    return { index, kernel, fraction, moved: kernel.before + fraction * kernel.bytes };
  }

  /* Place one kernel's reads, or its writes, on the bus: a train of blocks that has not left at
     fraction 0 and is all across at 1. `left` and `width` are shares of the bus. */
  function train(tensors, fraction, unit) {
    const widths = tensors.map(({ bytes }) => Math.max(SLIVER, (BLOCK * bytes) / unit));
    let head = fraction * (1 + widths.reduce((a, b) => a + b, 0));
    return tensors.map(({ tensor, bytes }, i) => {
      head -= widths[i];
      return { tensor, bytes, left: head, width: widths[i] };
    });
  }

  const sum = (list) => list.reduce((total, { bytes }) => total + bytes, 0);

  function size(bytes) {
    for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (bytes >= scale) {
        const digits = bytes < 10 * scale ? 2 : bytes < 100 * scale ? 1 : 0;
        return `${(bytes / scale).toFixed(digits)} ${unit}`;
      }
    }
    return `${Math.round(bytes)} B`;
  }
  const micros = (seconds) => `${(seconds * 1e6).toFixed(1)} µs`;
  const tensors = (list) => list.map(({ tensor, bytes }) => `${tensor} ${size(bytes)}`).join(", ");

  const pure = { timeline, stateAt, train, size };
  if (typeof module !== "undefined") module.exports = pure;
  if (typeof document === "undefined") return;

  function add(parent, tag, text, className) {
    const made = parent.appendChild(document.createElement(tag));
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function race(box) {
    const $ = (name) => box.querySelector(`.race-${name}`);
    const data = JSON.parse($("data").textContent);
    const live = $("live");
    const play = $("play");
    const scrub = $("scrub input");
    const cells = $("cell");
    const reduced = matchMedia("(prefers-reduced-motion: reduce)");
    const lanes = [...box.querySelectorAll(".race-lane")].map((lane) => ({
      lane,
      count: lane.querySelector(".race-count"),
      now: lane.querySelector(".race-now"),
      rails: ["read", "write"].map((kind) => lane.querySelector(`.race-${kind}`)),
      track: lane.querySelector(".race-track"),
    }));
    const chosen = (group) => box.querySelector(`[name$="-${group}"]:checked`).value;
    let line;
    let t = 0;
    let playing = false;
    let last = 0;
    let frame = 0;

    data.cells.forEach((cell, i) => {
      add(cells, "option", `${cell.M} × ${cell.N} ${cell.dtype}`).value = i;
    });
    cells.value = data.start;

    function say(text) {
      $("status").textContent = text;
    }

    /* Build what does not move: the tracks, the table and the statement of the chosen race. */
    function choose() {
      const byBytes = chosen("time") === "bytes";
      const cell = data.cells[cells.value];
      line = timeline(data, cells.value, chosen("pass"), byBytes);
      lanes.forEach((view, i) => {
        view.shown = -1;
        view.track.textContent = "";
        const { kernels, end } = line.lanes[i];
        const short = end < line.end / 3; // its kernels share one label, in the empty track
        const names = kernels.map(({ name }) => name.split(" ")[0]);
        kernels.forEach((kernel, k) => {
          const width = (kernel.end - kernel.start) / line.end;
          const bar = add(view.track, "span", "", "race-kernel");
          bar.style.left = `${(100 * kernel.start) / line.end}%`;
          bar.style.width = `${100 * width}%`;
          bar.style.setProperty("--read", `${(100 * kernel.readBytes) / kernel.bytes}%`);
          bar.style.setProperty("--block", `${(100 * line.unit) / kernel.bytes}%`);
          bar.title = `${kernel.name}, ${size(kernel.bytes)}, ${micros(kernel.end - kernel.start)}`;
          const last = k === kernels.length - 1;
          const right = short || last ? line.end : kernel.end;
          if (short ? k : (right - kernel.start) / line.end < 0.055) return;
          const label = add(view.track, "i", short ? names.join(", ") : names[k]);
          label.style.left = bar.style.left;
          label.style.right = `${100 * (1 - right / line.end)}%`;
        });
        view.veil = add(view.track, "span", "", "race-veil");
      });
      const keep = byBytes
        ? ["bytes"]
        : [`recording-${cell.recording}`, `profile-${line.lanes[0].profile}`];
      for (const p of box.querySelectorAll("[class*=race-if-]")) {
        p.classList.toggle("race-off", !keep.some((k) => p.classList.contains(`race-if-${k}`)));
      }
      fillTable(cell);
      move(0);
      stop();
      say(`${cells.selectedOptions[0].text}, ${chosen("pass")}: ` + line.lanes
        .map((l) => `${l.name} ${size(l.bytes)} in ${micros(l.end)}`).join("; ") + ".");
    }

    function fillTable(cell) {
      const holder = $("steps");
      holder.textContent = "";
      const pass = chosen("pass").replace(/^./, (letter) => letter.toUpperCase());
      add(holder, "p", `${pass} at ${cell.M} × ${cell.N} in ${cell.dtype}`);
      const wrapper = add(holder, "div", "", "table-wrapper docutils container");
      const table = add(wrapper, "table", "", "docutils");
      const head = add(add(table, "thead"), "tr");
      for (const name of ["lane", "kernel", "reads", "writes", "time"]) {
        add(head, "th", name).scope = "col";
      }
      const body = add(table, "tbody");
      for (const lane of line.lanes) {
        for (const k of lane.kernels) {
          const row = add(body, "tr");
          const words = [k.name, tensors(k.reads), tensors(k.writes), micros(k.end - k.start)];
          for (const text of [lane.name, ...words]) add(row, "td", text);
        }
      }
    }

    /* Draw time t. */
    function move(to) {
      t = Math.min(line.end, Math.max(0, to));
      scrub.value = Math.round((t / line.end) * scrub.max);
      scrub.setAttribute("aria-valuetext", `${micros(t)} of ${micros(line.end)}`);
      const fused = line.lanes[line.lanes.length - 1].end;
      $("clock").textContent = `${micros(t)} of ${micros(line.end)}; at 1 × a second here is `
        + `${micros(line.end / PLAY_S)} on the GPU`;
      lanes.forEach((view, i) => {
        const lane = line.lanes[i];
        const at = stateAt(lane, t);
        const took = micros(Math.min(t, lane.end));
        view.count.textContent = `${size(at.moved)} of ${size(lane.bytes)} · ${took}`;
        view.veil.style.left = `${(100 * t) / line.end}%`;
        view.lane.classList.toggle("race-done", !at.kernel);
        if (view.shown !== at.index) {
          view.shown = at.index;
          view.rails.forEach((rail) => (rail.textContent = ""));
          const k = at.kernel;
          const ratio = (lane.end / fused).toFixed(2);
          view.now.textContent = k
            ? `${at.index + 1} of ${lane.kernels.length}: ${k.name}, reads ${tensors(k.reads)}, `
              + `writes ${tensors(k.writes)}`
            : `✓ finished at ${micros(lane.end)}` + (lane.end > fused ? `, ${ratio} × fused` : "");
          if (!k) return;
          view.rails.forEach((rail, w) => {
            for (const { tensor, bytes } of w ? k.writes : k.reads) {
              add(rail, "b", `${tensor} ${size(bytes)}`);
            }
          });
        }
        if (!at.kernel) return;
        view.rails.forEach((rail, w) => {
          const side = w ? "right" : "left"; // writes cross the bus the other way
          train(w ? at.kernel.writes : at.kernel.reads, at.fraction, line.unit).forEach((b, j) => {
            rail.children[j].style[side] = `${100 * b.left}%`;
            rail.children[j].style.width = `${100 * b.width}%`;
          });
        });
      });
    }

    function where() {
      return `${micros(t)}: ` + line.lanes.map((lane) => {
        const { kernel, index } = stateAt(lane, t);
        const n = lane.kernels.length;
        return lane.name + (kernel ? ` in kernel ${index + 1} of ${n}, ${kernel.name}` : " finished");
      }).join("; ") + ".";
    }

    /* Move to a later time and announce who finished on the way, and the end. */
    function advance(to) {
      const before = t;
      move(to);
      const arrived = line.lanes.filter((lane) => before < lane.end && lane.end <= t);
      for (const lane of arrived) say(`${lane.name} finished at ${micros(lane.end)}.`);
      if (t < line.end) return;
      stop();
      say(`All finished: ${line.lanes.map((l) => `${l.name} ${micros(l.end)}`).join(", ")}.`);
    }

    function tick(now) {
      const elapsed = Math.min(0.1, (now - last) / 1000); // a tab that slept does not jump
      if (!reduced.matches) {
        last = now;
        advance(t + (elapsed * $("speed").value * line.end) / PLAY_S);
      } else if ((now - last) / 1000 > STEP_S / $("speed").value) {
        last = now;
        advance(line.stops.find((stop) => stop > t) ?? line.end);
      }
      if (playing) frame = requestAnimationFrame(tick);
    }

    function stop(why) {
      if (playing && why) say(`${why} at ${where()}`);
      playing = false;
      cancelAnimationFrame(frame);
      play.textContent = t < line.end ? "Play" : "Play again";
    }

    function step(to) {
      move(to);
      stop();
      say(`At ${where()}`);
    }

    play.addEventListener("click", () => {
      if (playing) return stop("Paused");
      if (t >= line.end) move(0);
      playing = true;
      play.textContent = "Pause";
      say("Playing.");
      last = reduced.matches ? -Infinity : performance.now(); // the first step comes at once
      frame = requestAnimationFrame(tick);
    });
    $("next").addEventListener("click", () => step(line.stops.find((s) => s > t) ?? line.end));
    $("previous").addEventListener("click", () => step(line.stops.findLast((s) => s < t) ?? 0));
    scrub.addEventListener("input", () => {
      move((scrub.value / scrub.max) * line.end);
      stop();
    });
    scrub.addEventListener("change", () => say(`At ${where()}`));
    cells.addEventListener("change", choose);
    for (const radio of box.querySelectorAll("[type=radio]")) radio.addEventListener("change", choose);
    new IntersectionObserver((seen) => {
      if (!seen[seen.length - 1].isIntersecting) stop("Paused out of sight");
    }).observe(live);

    choose();
    live.hidden = false;
    $("still").hidden = true;
  }

  document.querySelectorAll(".race").forEach(race);
})();
