// The visitor's settings as fields of a request.

import { ApiError } from "./api.js";

const by = (id) => document.getElementById(id);
const FIELD_OF = { max_completion_tokens: "max_tokens", messages: "prompt", method: "method", key: "key" };

/** Fill the list of methods; the server's default is chosen. */
export function offerMethods({ default: standard, methods }) {
  const [name, ...options] = standard.split(":");
  by("method").replaceChildren(
    ...methods.map((method) => {
      const option = new Option(method.name, method.name, false, method.name === name);
      option.dataset.note = `${method.name}: ${method.summary}${method.needs ? `; needs ${method.needs}` : ""}.`;
      return option;
    }),
  );
  by("options").value = options.join(":");
  showSummary();
}

/** The method's name with its options. */
export function chosenMethod() {
  const options = by("options").value.trim();
  return by("method").value + (options ? `:${options}` : "");
}

/** Show a summary in the closed settings. */
export function showSummary() {
  const heat = Number(by("temperature").value);
  const told = [chosenMethod(), heat ? `temperature ${heat}` : "greedy", `${by("max_tokens").value || "128"} tokens`];
  if (by("response_format").value.trim()) told.push("JSON schema");
  by("summary").textContent = `Settings: ${told.join(", ")}`;
  by("method-note").textContent = by("method").selectedOptions[0]?.dataset.note ?? "";
}

/** Fields of a request, without its messages and its method; throws an ApiError. */
export function chosenFields() {
  const fields = {
    temperature: number("temperature") ?? 0,
    max_completion_tokens: number("max_tokens") ?? 128,
    seed: number("seed") ?? Math.floor(Math.random() * 2 ** 31),
  };
  const schema = by("response_format").value.trim();
  if (schema) {
    const json_schema = { name: "answer", strict: true, schema: parsed(schema) };
    fields.response_format = { type: "json_schema", json_schema };
  }
  return fields;
}

/** Mark the field that an error names, and open the settings if they contain it. */
export function markField(param) {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  if (!param) return;
  const names = [param, ...String(param).split(".").reverse()];
  const field = names.map((name) => by(FIELD_OF[name] ?? name)).find((found) => found?.matches("input,select,textarea"));
  if (!field) return;
  field.setAttribute("aria-invalid", "true");
  field.closest("details")?.setAttribute("open", "");
  field.focus();
}

function number(id) {
  const input = by(id);
  if (input.validity.badInput) throw new ApiError(`${input.labels[0].textContent.trim()}: not a number.`, { param: id });
  return input.value === "" ? null : Number(input.value);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ApiError(`JSON schema: not valid JSON (${error.message}).`, { param: "response_format" });
  }
}
