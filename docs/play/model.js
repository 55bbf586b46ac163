"use strict";
/* The demo models in plain JavaScript: a Llama-style decoder with TAPE or RoPE and ALiBi's bias.
   Matrices are arrays of rows. */

/** Return the numbers of base64 text of little-endian float16. */
function decodeHalf(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float64Array.from({ length: bytes.length / 2 }, (_, i) => {
    const bits = view.getUint16(2 * i, true);
    const sign = bits >> 15 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = (bits & 1023) / 1024;
    return exponent ? sign * (1 + fraction) * 2 ** (exponent - 15) : sign * fraction * 2 ** -14;
  });
}

const sum = (x) => x.reduce((a, b) => a + b, 0);
const add = (x, y) => x.map((value, i) => value + y[i]);
const silu = (x) => x / (1 + Math.exp(-x));

function dot(x, y) {
  let total = 0;
  for (let i = 0; i < x.length; i++) total += x[i] * y[i];
  return total;
}

/** Return x [n] @ kernel [n][m], which is the sum of the kernel's rows, each times its weight. */
function times(x, kernel) {
  const out = new Float64Array(kernel[0].length);
  for (let i = 0; i < x.length; i++) {
    const row = kernel[i];
    for (let j = 0; j < row.length; j++) out[j] += x[i] * row[j];
  }
  return out;
}

/** Return the product of two arrays that hold complex numbers as [real half | imaginary half]. */
function complexTimes(x, y) {
  const n = x.length / 2;
  return x.map((value, i) =>
    i < n ? value * y[i] - x[i + n] * y[i + n] : x[i - n] * y[i] + value * y[i - n]);
}

function softmax(logits) {
  const top = Math.max(...logits);
  const weights = logits.map((x) => Math.exp(x - top));
  const total = sum(weights);
  return weights.map((x) => x / total);
}

const cosine = (x, y) => dot(x, y) / Math.sqrt(dot(x, x) * dot(y, y));

class Model {
  /** Read a model as train.training.shipped writes it. */
  constructor(record) {
    this.record = record;
    this.symbols = record.symbols;
    const config = (this.config = record.experiment.model);
    this.heads = config.num_heads;
    this.dim = config.hidden_size / config.num_heads;
    this.isTape = config.position.kind.startsWith("tape");
    const numbers = decodeHalf(record.weights);
    let start = 0;
    const cut = (shape) => {
      if (shape.length === 1) return numbers.subarray(start, (start += shape[0]));
      return Array.from({ length: shape[0] }, () => cut(shape.slice(1)));
    };
    const params = {};
    for (const [name, shape] of Object.entries(record.parameters)) params[name] = cut(shape);
    this.embedding = params.embedding;
    this.finalNorm = params["final_norm/scale"];
    this.head = params["head/kernel"];
    this.layers = [];
    // Like layers are stacked under the name of the first of them.
    for (const [name, stack] of Object.entries(params)) {
      const found = name.match(/^layers_(\d+)\/(.*?)(\/kernel|\/scale)?$/);
      if (found) stack.forEach((x, i) => ((this.layers[Number(found[1]) + i] ??= {})[found[2]] = x));
    }
  }

  norm(x, scale) {
    const inverse = 1 / Math.sqrt(dot(x, x) / x.length + this.config.norm_eps);
    return x.map((value, i) => value * inverse * scale[i]);
  }

  /** Return the rotary state of a place: cosines, then sines. */
  startState(place) {
    const half = this.dim / 2;
    return Float64Array.from({ length: this.dim }, (_, i) => {
      const angle = place * this.config.position.base ** (-(i % half) / half);
      return i < half ? Math.cos(angle) : Math.sin(angle);
    });
  }

  /**
   * Run the model.
   * tokens: ids [T]. update: false leaves every state at its start.
   * Returns the logits after the last token and, for each layer, attention [T][H][T] and
   * pointing [T][H][T]: the cosine of the state that enters with the start state of each place.
   */
  run(tokens, { update = true } = {}) {
    const starts = tokens.map((_, t) => this.startState(t));
    let states = starts.map((e) => Array.from({ length: this.heads }, () => e));
    let hidden = tokens.map((token) => this.embedding[token]);
    const layers = [];
    for (const layer of this.layers) {
      const pointing = states.map((e) => e.map((one) => starts.map((s) => cosine(one, s))));
      const { attention, out, attended } = this.attend(layer, hidden, states);
      hidden = hidden.map((h, t) => add(h, times(out[t], layer["attention/out"])));
      const changes = hidden.map((h) => this.mlp(layer, this.norm(h, layer.mlp_norm)));
      if (update && layer.position_mix) {
        states = states.map((e, t) => this.updated(layer, e, attended[t], changes[t]));
      }
      hidden = hidden.map((h, t) => add(h, changes[t]));
      layers.push({ attention, pointing });
    }
    const last = this.norm(hidden[hidden.length - 1], this.finalNorm);
    return { logits: Array.from(times(last, this.head)), layers };
  }

  attend(layer, hidden, states) {
    const { dim } = this;
    const heads = [...Array(this.heads).keys()];
    const normed = hidden.map((h) => this.norm(h, layer.attention_norm));
    const project = (name) =>
      normed.map((x) => {
        const all = times(x, layer[`attention/${name}`]);
        return heads.map((h) => all.subarray(h * dim, (h + 1) * dim));
      });
    const rotated = (x) => x.map((row, t) => row.map((one, h) => complexTimes(one, states[t][h])));
    const [q, k, v] = [rotated(project("q")), rotated(project("k")), project("v")];
    const attention = q.map((row, t) =>
      heads.map((h) => {
        const slope = 2 ** ((-8 * (h + 1)) / this.heads);
        const logits = k.slice(0, t + 1).map((key, j) =>
          dot(row[h], key[h]) / Math.sqrt(dim) - slope * (t - j));
        return [...softmax(logits), ...Array(q.length - t - 1).fill(0)];
      }));
    const mean = (values) => {
      const ofHead = heads.map((h) => values.map((x) => x[h]));
      return attention.map((row) => row.map((weights, h) => times(weights, ofHead[h])));
    };
    const out = mean(v).map((row) => row.flatMap((one) => [...one]));
    return { attention, out, attended: mean(states) };
  }

  mlp(layer, x) {
    const up = times(x, layer["mlp/up"]);
    const wide = times(x, layer["mlp/gate"]).map((g, i) => silu(g) * up[i]);
    return times(wide, layer["mlp/down"]);
  }

  /** Return norm((I + alpha G(x)) (e + alpha Mix(a))) of one token's states [H][D]. */
  updated(layer, e, attended, x) {
    const alpha = this.config.position.alpha;
    const gate = times(x, layer.position_wx).map(silu);
    const scaled = (weights) => weights.map((w) => alpha * w);
    const z = e.map((one, h) => add(one, times(scaled(layer.position_mix[h]), attended)));
    const wide = layer.position_up.map((up, p) => times(up, z).map((value) => gate[p] * value));
    return z.map((one, h) => {
      const moved = add(one, times(scaled(layer.position_down[h]), wide));
      const scale = 1 / Math.sqrt(Math.max((2 * dot(moved, moved)) / moved.length, 1e-12));
      return moved.map((value) => value * scale);
    });
  }
}

/**
 * Read a question such as "m c x a k +2 c?".
 * Returns tokens (ids), list (names), asked and answer (places in the list), offset.
 * Throws an Error whose message is a sentence for the person who wrote it.
 */
function parseQuestion(text, symbols) {
  const fail = (sentence) => {
    throw new Error(sentence);
  };
  const names = symbols.slice(1);
  const listed = names.filter((name) => names.includes(`${name}?`));
  const offsets = names.filter((name) => /^\+\d+$/.test(name));
  const words = text.trim().split(/\s+/).filter(Boolean);
  const example = "c b a +1 b?";
  if (!words.length) {
    fail(`Type a list, an offset and a token with a question mark, such as “${example}”.`);
  }
  for (const word of words) {
    if (listed.includes(word) || offsets.includes(word)) continue;
    if (word.endsWith("?") && listed.includes(word.slice(0, -1))) continue;
    if (/^[+-]?\d+$/.test(word)) {
      fail(`The model knows the offsets ${offsets[0]} to ${offsets.at(-1)}, not “${word}”.`);
    }
    fail(`“${word}” is not a token: lists have the letters a to z and A to F, with spaces between.`);
  }
  const kinds = words.map((word) => (word.endsWith("?") ? "q" : word.startsWith("+") ? "o" : "l"));
  const shape = kinds.join("");
  const list = words.slice(0, shape.search(/[^l]|$/));
  if (list.length > listed.length) {
    fail(`The list has ${list.length} tokens; at most ${listed.length} fit, for all are distinct.`);
  }
  const twice = list.find((word, i) => list.indexOf(word) < i);
  if (twice) fail(`“${twice}” stands in the list twice; the tokens of a list are distinct.`);
  if ((shape.match(/q/g) || []).length > 1) fail("Ask one question at a time.");
  if (!/^l+oq$/.test(shape)) {
    fail(`After the list, end with one offset and one token with a question mark, such as “${example}”.`);
  }
  const offset = Number(words.at(-2));
  const token = words.at(-1).slice(0, -1);
  const asked = list.indexOf(token);
  if (asked < 0) fail(`“${token}” is not in the list.`);
  const answer = asked + offset;
  if (answer >= list.length) {
    const after = list.length - 1 - asked;
    const follow = ["no tokens follow", "only 1 token follows"][after] ?? `only ${after} tokens follow`;
    fail(`The offset leads beyond the list: ${follow} ${token}, and you asked for +${offset}.`);
  }
  return { tokens: words.map((word) => symbols.indexOf(word)), words, list, asked, answer, offset };
}
