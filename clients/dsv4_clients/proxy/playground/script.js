"use strict";

const TEXTS = {
  en: {
    skip: "Skip to the question", language: "Language", conversation: "Conversation", question: "Question",
    placeholder: "Ask something. Enter sends, Shift+Enter starts a new line, Escape stops.", send: "Send", stop: "Stop",
    clear: "Clear", settings: "Settings", thinking: "Thinking", off: "off", system: "System prompt",
    maxTokens: "Longest answer (tokens)", temperature: "Temperature (0: greedy)", seed: "Seed", tools: "Tools (JSON)",
    key: "API key", live: "Live", acceptance: "Accepted drafts", cache: "Cache in use", running: "Running requests",
    you: "You", model: "Model", call: "Call", result: "Result of", giveResult: "Send results", stopped: "stopped",
    done: "The answer is complete.", answering: "Answering.", ready: "engine ready", notReady: "engine not ready",
    unreachable: "no answer from the server", badTools: "The tools are not valid JSON.", tokens: "tokens",
    first: "first after", cut: "cut off at the length limit", drafts: "of drafts accepted",
  },
  zh: {
    skip: "跳到输入框", language: "语言", conversation: "对话", question: "问题",
    placeholder: "请输入问题。回车发送，Shift+回车换行，Esc 停止。", send: "发送", stop: "停止", clear: "清空",
    settings: "设置", thinking: "思考", off: "关闭", system: "系统提示词", maxTokens: "最大回答长度（token）",
    temperature: "温度（0 为贪心）", seed: "随机种子", tools: "工具（JSON）", key: "API 密钥", live: "实时状态",
    acceptance: "草稿接受率", cache: "缓存占用", running: "运行中的请求", you: "你", model: "模型", call: "调用",
    result: "返回结果：", giveResult: "发送结果", stopped: "已停止", done: "回答完成。", answering: "正在回答。",
    ready: "引擎就绪", notReady: "引擎未就绪", unreachable: "服务器没有响应", badTools: "工具不是合法的 JSON。",
    tokens: "个 token", first: "首个 token 用时", cut: "因长度上限被截断", drafts: "草稿被接受",
  },
};
const SAMPLES = 60;
const POLL_MILLISECONDS = 2000;

const byId = (id) => document.getElementById(id);
const state = { messages: [], controller: null, language: "en", charts: {}, drafts: null };
const text = (name) => TEXTS[state.language][name];

function element(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

function setLanguage(language) {
  state.language = language;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const each of document.querySelectorAll("[data-text]")) each.textContent = text(each.dataset.text);
  for (const each of document.querySelectorAll("[data-label]")) each.setAttribute("aria-label", text(each.dataset.label));
  byId("question").placeholder = text("placeholder");
}

function headers() {
  const key = byId("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function requestBody() {
  const body = { messages: [...state.messages], stream: true, stream_options: { include_usage: true } };
  const system = byId("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "seed"]) {
    const value = byId(name).value;
    if (value !== "") body[name] = Number(value);
  }
  if (byId("effort").value) body.reasoning_effort = byId("effort").value;
  if (byId("tools").value.trim()) body.tools = JSON.parse(byId("tools").value);
  return body;
}

function addArticle(kind, title) {
  const article = element("article", kind);
  article.append(element("h2", "", title));
  byId("conversation").append(article);
  return article;
}

/* Pieces come faster than frames: they are collected, and written into one text node a frame. */
const pending = new Map();

function append(node, piece) {
  if (!pending.size) requestAnimationFrame(flush);
  pending.set(node, (pending.get(node) || "") + piece);
}

function flush() {
  for (const [node, piece] of pending) {
    if (node.firstChild) node.firstChild.appendData(piece);
    else node.append(piece);
  }
  pending.clear();
  scrollDown();
}

function scrollDown() {
  const box = byId("conversation");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

class AnswerView {
  constructor() {
    this.article = addArticle("assistant", text("model"));
    this.message = { role: "assistant", content: "" };
    this.started = performance.now();
    this.first = null;
    this.usage = null;
    this.finish = null;
    this.pieces = 0;
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      const delta = choice.delta;
      if (choice.finish_reason) this.finish = choice.finish_reason;
      if (delta.reasoning_content) this.think(delta.reasoning_content);
      if (delta.content) this.say(delta.content);
      for (const part of delta.tool_calls || []) this.call(part);
    }
  }

  count() {
    this.pieces += 1;
    this.first ??= performance.now();
    const seconds = (performance.now() - this.first) / 1000;
    if (seconds > 0.2) byId("speed").textContent = `${(this.pieces / seconds).toFixed(1)}/s`;
  }

  think(piece) {
    this.count();
    if (!this.thinking) {
      this.fold = element("details");
      this.fold.open = true;
      this.thinking = element("div", "thinking");
      this.fold.append(element("summary", "", text("thinking")), this.thinking);
      this.article.append(this.fold);
    }
    this.message.reasoning_content = (this.message.reasoning_content || "") + piece;
    append(this.thinking, piece);
  }

  say(piece) {
    this.count();
    if (this.fold && !this.message.content) this.fold.open = false;
    if (!this.body) {
      this.body = element("div", "body");
      this.article.append(this.body);
    }
    this.message.content += piece;
    append(this.body, piece);
  }

  call(part) {
    this.count();
    const calls = (this.message.tool_calls ||= []);
    if (!calls[part.index]) {
      calls[part.index] = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
      const details = element("details");
      details.open = true;
      const code = element("pre");
      details.append(element("summary", "", `${text("call")} ${part.function.name}`), code);
      this.article.append(details);
      calls[part.index].view = code;
    }
    const piece = (part.function && part.function.arguments) || "";
    calls[part.index].function.arguments += piece;
    append(calls[part.index].view, piece);
  }

  close(problem) {
    flush();
    if (this.fold) this.fold.open = false;
    if (this.body) this.body.replaceWith(formatted(this.message.content));
    const facts = [];
    if (this.usage) {
      const seconds = (performance.now() - this.first) / 1000;
      const speed = (this.usage.completion_tokens / Math.max(seconds, 0.001)).toFixed(1);
      facts.push(`${this.usage.completion_tokens} ${text("tokens")}`, `${speed}/s`);
      facts.push(`${text("first")} ${((this.first - this.started) / 1000).toFixed(2)} s`);
      const details = this.usage.completion_tokens_details;
      const drafts = (details.accepted_prediction_tokens || 0) + (details.rejected_prediction_tokens || 0);
      if (drafts) facts.push(`${Math.round((100 * details.accepted_prediction_tokens) / drafts)} % ${text("drafts")}`);
    }
    if (this.finish === "length") facts.push(text("cut"));
    if (facts.length) this.article.append(element("p", "figures", facts.join(" · ")));
    if (problem) this.article.append(element("p", "error", problem));
    for (const call of this.message.tool_calls || []) delete call.view;
  }
}

/* Fenced code becomes a block; everything else stays plain text, so an answer can never be markup. */
function formatted(content) {
  const body = element("div", "body");
  content.split(/^```.*\n?/m).forEach((piece, index) => {
    if (index % 2) body.append(element("pre", "", piece));
    else body.append(piece);
  });
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer() {
  const view = new AnswerView();
  state.controller = new AbortController();
  setBusy(true);
  let problem = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(requestBody()),
      signal: state.controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      view.add(chunk);
    }
  } catch (error) {
    problem = error.name === "AbortError" ? text("stopped") : error.message;
  }
  view.close(problem);
  setBusy(false, problem || text("done"));
  if (view.message.content || view.message.tool_calls) state.messages.push(view.message);
  else if (problem) state.messages.pop();
  if (view.finish === "tool_calls") askForResults(view);
  scrollDown();
}

function askForResults(view) {
  const form = element("form");
  const fields = view.message.tool_calls.map((call) => {
    const label = element("label", "", `${text("result")} ${call.function.name} `);
    const field = element("input");
    label.append(field);
    form.append(label);
    return { call, field };
  });
  const button = element("button", "", text("giveResult"));
  form.append(button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    for (const { call, field } of fields) {
      state.messages.push({ role: "tool", tool_call_id: call.id, content: field.value });
    }
    for (const each of form.querySelectorAll("input, button")) each.disabled = true;
    answer();
  });
  view.article.append(form);
  fields[0].field.focus();
}

function setBusy(busy, announcement) {
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
  byId("announcement").textContent = busy ? text("answering") : announcement;
  if (!busy) state.controller = null;
}

function send() {
  const question = byId("question").value.trim();
  if (!question || state.controller) return;
  try {
    requestBody();
  } catch {
    byId("announcement").textContent = text("badTools");
    byId("tools").focus();
    return;
  }
  byId("question").value = "";
  addArticle("user", text("you")).append(element("div", "body", question));
  state.messages.push({ role: "user", content: question });
  byId("conversation").scrollTop = byId("conversation").scrollHeight;
  answer();
}

/* Sum of all samples of a metric family in the Prometheus text format; null when there are none. */
function metric(exposition, name) {
  let sum = null;
  for (const line of exposition.split("\n")) {
    if (line.startsWith(name) && (line[name.length] === " " || line[name.length] === "{")) {
      sum = (sum ?? 0) + Number(line.slice(line.lastIndexOf(" ") + 1));
    }
  }
  return sum;
}

function draw(id, value, shown) {
  const values = (state.charts[id] ||= []);
  values.push(value);
  if (values.length > SAMPLES) values.shift();
  const top = id === "running" ? Math.max(1, ...values) : 1;
  const points = values.map((each, index) => `${(index * 120) / (SAMPLES - 1)},${31 - (30 * each) / top}`).join(" ");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points);
  byId(id).replaceChildren(line);
  byId(id).setAttribute("aria-label", shown);
  byId(`${id}-value`).textContent = shown;
}

function drawMetrics(exposition) {
  const cache = metric(exposition, "dsv4_kv_cache_usage_ratio");
  if (cache !== null) draw("cache", cache, `${(100 * cache).toFixed(1)} %`);
  const running = metric(exposition, "dsv4_requests_running");
  if (running !== null) draw("running", running, String(running));
  const drafted = metric(exposition, "dsv4_mtp_draft_tokens_total");
  const accepted = metric(exposition, "dsv4_mtp_accepted_tokens_total");
  if (drafted === null || accepted === null) return;
  if (state.drafts && drafted > state.drafts.drafted) {
    const share = (accepted - state.drafts.accepted) / (drafted - state.drafts.drafted);
    draw("acceptance", share, `${Math.round(100 * share)} %`);
  }
  state.drafts = { drafted, accepted };
}

async function poll() {
  if (!document.hidden) {
    try {
      const health = await (await fetch("health")).json();
      byId("engine").textContent = text(health.ready ? "ready" : "notReady");
      const response = await fetch("metrics", { headers: headers() });
      if (response.ok) drawMetrics(await response.text());
    } catch {
      byId("engine").textContent = text("unreachable");
    }
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.ok) byId("model").textContent = (await response.json()).data[0].id;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.controller) state.controller.abort();
});
byId("stop").addEventListener("click", () => state.controller && state.controller.abort());
byId("clear").addEventListener("click", () => {
  if (state.controller) state.controller.abort();
  state.messages = [];
  byId("conversation").replaceChildren();
  byId("question").focus();
});
byId("language").addEventListener("change", (event) => setLanguage(event.target.value));
byId("key").addEventListener("change", showModel);

byId("language").value = navigator.language.startsWith("zh") ? "zh" : "en";
setLanguage(byId("language").value);
showModel();
poll();
