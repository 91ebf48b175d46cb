// openai (npm) against a scripted model: node with_openai.mjs URL
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const say = (what, ok, shown) => console.log(`${ok ? "ok" : "WRONG"}\t${what}\t${ok ? "" : JSON.stringify(shown)}`);
const user = { role: "user", content: "How is the weather?" };
const model = "kaveri-tiny";
const whole = await client.chat.completions.create({ model, messages: [user] });
say("text", whole.choices[0].message.content === "Hello there.", whole);
const Person = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(130) });
const parsed = await client.chat.completions.parse({
  model,
  messages: [user],
  response_format: zodResponseFormat(Person, "person"),
});
say("schema", Number.isInteger(parsed.choices[0].message.parsed.age), parsed);
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "Tell the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      parse: JSON.parse,
      function: ({ city }) => `${city}: sunny`,
    },
  },
];
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model, messages: [user], tools, stream });
  const last = await runner.finalContent();
  say(`tools, 3 turns${stream ? ", streamed" : ""}`, last === "Sunny in Rome, rainy in Paris.", last);
}
