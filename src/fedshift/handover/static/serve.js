"use strict";
// The token stands behind # in the address, which browsers do not send to servers.
const part = (id) => document.getElementById(id);
let token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
let model = null;

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}), Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { ...options, headers });
  const content = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(content.error), { status: answer.status });
  return content;
}

function complain(text) {
  part("problem").textContent = text;
  part("problem").hidden = !text;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function bars(shares) {
  const rows = Object.entries(shares).sort((one, other) => other[1] - one[1]).slice(0, 20);
  part("bars").replaceChildren(...rows.map(([name, share]) => {
    const row = document.createElement("li");
    const label = document.createElement("b");
    if (model.colours) {
      const mark = document.createElement("s");
      mark.style.background = model.colours[model.classes.indexOf(name)];
      label.append(mark);
    }
    label.append(name);
    const value = document.createElement("i");
    value.textContent = percent(share);
    const meter = document.createElement("meter");
    meter.value = share;
    row.append(label, value, meter);
    return row;
  }));
}

function show(found, name, address) {
  complain("");
  part("result").hidden = false;
  part("result").classList.toggle("plain", !address);
  part("shown").hidden = !address;
  if (address) part("shown").src = found.picture ? `data:image/png;base64,${found.picture}` : address;
  part("file-name").textContent = name;
  part("prediction").textContent = found.prediction ? `${found.prediction} (${percent(found.confidence)})` : "Share of each class";
  part("note").textContent = found.note || "";
  bars(found.probabilities || found.shares);
}

async function predict(file) {
  if (file.size > model.max_bytes) {
    return complain(`That file has ${Math.ceil(file.size / 2 ** 20)} MB; the limit here is ${model.max_bytes / 2 ** 20} MB.`);
  }
  complain("");
  part("drop").setAttribute("aria-busy", "true");
  try {
    const found = await ask("/predict", { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } });
    show(found, file.name, URL.createObjectURL(file));
  } catch (error) {
    part("result").hidden = true;
    complain(error.message || "The server does not answer.");
  } finally {
    part("drop").removeAttribute("aria-busy");
  }
}

async function predictRow(event) {
  event.preventDefault();
  const values = [...part("row").querySelectorAll("input")].map((field) => (field.value.trim() ? Number(field.value) : null));
  try {
    const found = await ask("/predict", {
      method: "POST",
      body: JSON.stringify({ rows: [values.map((value) => (Number.isNaN(value) ? null : value))] }),
      headers: { "Content-Type": "application/json" },
    });
    show(found.rows[0], "", "");
  } catch (error) {
    complain(error.message || "The server does not answer.");
  }
}

function rowForm(columns) {
  const fields = columns.map((name) => {
    const label = document.createElement("label");
    const field = document.createElement("input");
    field.inputMode = "decimal";
    field.size = 8;
    label.append(name, field);
    return label;
  });
  const button = document.createElement("button");
  button.textContent = "Predict";
  part("row").replaceChildren(...fields, button);
  part("row").hidden = false;
}

async function begin() {
  try {
    model = await ask("/model");
  } catch (error) {
    part("ask").hidden = error.status !== 401;
    part("about").textContent = error.status === 401 ? "The token is in the terminal that fedshift serve runs in." : "";
    return complain(error.status === 401 && !token ? "" : error.message || "The server does not answer.");
  }
  complain("");
  part("ask").hidden = true;
  part("name").textContent = model.name;
  document.title = `${model.name} - fedshift serve`;
  part("about").textContent = `${model.classes.length} classes: ${model.classes.slice(0, 12).join(", ")}${model.classes.length > 12 ? ", ..." : ""}. Predicted by ${model.model}.`;
  part("warnings").replaceChildren(...model.warnings.map((text) => {
    const line = document.createElement("li");
    line.textContent = text;
    return line;
  }));
  part("warnings").hidden = !model.warnings.length;
  if (model.columns) rowForm(model.columns);
  else part("drop").hidden = false;
}

part("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = part("token").value.trim();
  begin();
});
part("row").addEventListener("submit", predictRow);
part("file").addEventListener("change", () => part("file").files[0] && predict(part("file").files[0]));
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    part("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && model && !model.columns && event.dataTransfer.files[0]) predict(event.dataTransfer.files[0]);
  });
}
begin();
