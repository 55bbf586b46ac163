"use strict";
/* The page: reads the controls, runs a model, draws one layer. */

const $ = (id) => document.getElementById(id);
const models = Object.fromEntries(
  Object.entries(MODELS).map(([name, record]) => [name, new Model(record)]));
// What is drawn: the question, what the model did with it, and the token looked at.
let shown = null;

const percent = (x) => `${Math.round(100 * x)}\u00a0%`;
const chosenModel = () => models[document.querySelector("[name=encoding]:checked").value];

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Run the model on what is in the field; where that is no question, say why and draw nothing. */
function ask({ keepToken = false } = {}) {
  const model = chosenModel();
  const cut = $("cut");
  cut.disabled = !model.isTape;
  $("cut-help").textContent = model.isTape
    ? "Every state then stays at its start." : "RoPE has no update.";
  const token = keepToken && shown ? shown.token : null;
  try {
    const question = parseQuestion($("question").value, model.symbols);
    const result = model.run(question.tokens, { update: !(cut.checked && model.isTape) });
    const last = question.tokens.length - 1;
    shown = { model, question, result, token: token === null ? last : Math.min(token, last) };
    say("");
  } catch (error) {
    shown = null;
    say(error.message);
  }
  draw();
}

function say(problem) {
  $("problem").textContent = problem;
  $("question").setAttribute("aria-invalid", String(Boolean(problem)));
}

function draw() {
  $("result").hidden = shown === null;
  if (shown === null) {
    for (const id of ["answer", "summary", "grid"]) $(id).replaceChildren();
    return;
  }
  drawAnswer();
  drawGrid();
  drawLayer();
}

function drawAnswer() {
  const { model, question, result } = shown;
  const probabilities = softmax(result.logits);
  const best = probabilities.indexOf(Math.max(...probabilities));
  const right = question.list[question.answer];
  const answer = model.symbols[best];
  const cut = $("cut").checked && model.isTape ? " without its update" : "";
  $("answer").replaceChildren(
    `${model.record.name}${cut} answers `, element("b", { textContent: answer }),
    ` with probability ${percent(probabilities[best])}. `,
    answer === right ? "That is right." : `That is wrong: the right answer is ${right}.`);
}

/** Draw a column for each token; drawLayer fills its cells. */
function drawGrid() {
  const { model, question, token } = shown;
  const rows = (make) => [
    ...Array.from({ length: model.heads }, (_, h) => make("attention", h)),
    element("span", { className: "gap" }),
    ...Array.from({ length: model.heads }, (_, h) => make("state", h)),
  ];
  const titles = { attention: "attends", state: "points" };
  const heads = element("div", { className: "column heads" },
    element("span", { className: "token" }),
    ...rows((kind, h) => element("span", { className: kind },
      element("span", { className: "title", textContent: h ? "" : `${titles[kind]} ` }), `${h + 1}`)));
  heads.setAttribute("aria-hidden", "true");
  const columns = question.words.map((word, t) => {
    const radio = element("input", { type: "radio", name: "token", value: t, checked: t === token });
    radio.setAttribute("aria-label", `${word}, place ${t + 1}`);
    const role = t === question.asked ? " asked" : t === question.answer ? " answer" : "";
    return element("label", { className: `column${role}` }, radio,
      element("span", { className: "token", textContent: word }),
      ...rows((kind) => element("span", { className: `cell ${kind}` })));
  });
  $("grid").replaceChildren(heads, ...columns);
}

/** Fill the cells for the layer and the token that are chosen, and say the same in words. */
function drawLayer() {
  const number = Number($("layer").value);
  $("layer-number").textContent = `${number} of ${$("layer").max}`;
  if (shown === null) return;
  const { question, result, token } = shown;
  const { attention, pointing } = result.layers[number - 1];
  const kinds = { attention: attention[token], state: pointing[token] };
  for (const [kind, heads] of Object.entries(kinds)) {
    const scaled = heads.map((row) => {
      const low = kind === "state" ? Math.min(...row) : 0;
      const high = kind === "state" ? Math.max(...row) : 1;
      return row.map((x) => (x - low) / (high - low || 1));
    });
    document.querySelectorAll("label.column").forEach((column, t) => {
      column.querySelectorAll(`.${kind}`).forEach((cell, h) => {
        cell.style.setProperty("--value", scaled[h][t].toFixed(3));
        const unit = kind === "attention" ? percent(heads[h][t]) : `cosine ${heads[h][t].toFixed(2)}`;
        cell.title = `head ${h + 1}, ${question.words[t]}: ${unit}`;
      });
    });
  }
  $("summary").textContent = describe(number, kinds);
}

/** Return sentences on where each head attends most, and where its state points. */
function describe(number, { attention, state }) {
  const { question, token } = shown;
  const at = (t) => `${question.words[t]} (place ${t + 1})`;
  const most = (heads) => heads.map((row) => at(row.indexOf(Math.max(...row))));
  const places = (found) => found.every((place) => place === found[0])
    ? `${found[0]}, all of them` : `${found.slice(0, -1).join(", ")} and ${found.at(-1)}`;
  return `In layer ${number} the heads of ${at(token)} attend most to ${places(most(attention))}. `
    + `Their states point to ${places(most(state))}.`;
}

/** Write a random question about a list of so many tokens into the field. */
function randomQuestion(length) {
  const names = chosenModel().symbols;
  const letters = names.filter((name) => names.includes(`${name}?`));
  const below = (n) => Math.floor(Math.random() * n);
  for (let i = letters.length - 1; i > 0; i--) {
    const j = below(i + 1);
    [letters[i], letters[j]] = [letters[j], letters[i]];
  }
  const offset = 1 + below(chosenModel().record.experiment.task.offsets);
  const asked = letters[below(length - offset)];
  $("question").value = `${letters.slice(0, length).join(" ")} +${offset} ${asked}?`;
  ask();
}

function drawOrigin() {
  const rows = Object.values(MODELS).flatMap((record) =>
    record.scores.map((score) => element("tr", {},
      ...[`${record.name}${score.seed === record.seed ? " (shown here)" : ""}`, score.seed,
        percent(score.trained), percent(score.beyond)].map((x) => element("td", { textContent: x })))));
  $("scores").replaceChildren(...rows);
  $("origin").textContent = Object.values(MODELS).map((record) =>
    `${record.name}: ${record.config}, seed ${record.seed}, ${record.step.toLocaleString("en")} steps, `
    + `commit ${record.commit}.`).join(" ")
    + " Of three seeds the middle one on longer lists is shown. Weights are rounded to 16 bits.";
}

$("form").addEventListener("submit", (event) => event.preventDefault());
$("question").addEventListener("input", () => ask());
document.querySelectorAll("[name=encoding], #cut").forEach((input) =>
  input.addEventListener("change", () => ask({ keepToken: true })));
$("layer").addEventListener("input", drawLayer);
$("grid").addEventListener("change", (event) => {
  shown.token = Number(event.target.value);
  drawLayer();
});
$("short").addEventListener("click", () => randomQuestion(16));
$("long").addEventListener("click", () => randomQuestion(32));
$("back").hidden = location.protocol === "file:";
drawOrigin();
ask();
