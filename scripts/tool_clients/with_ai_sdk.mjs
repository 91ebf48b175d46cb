// Vercel's AI SDK against a scripted model: node with_ai_sdk.mjs URL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "kaveri",
  baseURL: process.argv[2],
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const say = (what, ok, shown) => console.log(`${ok ? "ok" : "WRONG"}\t${what}\t${ok ? "" : JSON.stringify(shown)}`);
const model = provider("kaveri-tiny");
const text = await generateText({ model, prompt: "Hi", maxRetries: 0 });
say("text", text.text === "Hello there.", text.text);
const schema = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(130) });
const object = await generateObject({ model, schema, prompt: "Someone", maxRetries: 0 });
say("schema", Number.isInteger(object.object.age), object.object);
const tools = {
  weather: tool({
    description: "Tell the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `${city}: sunny`,
  }),
};
const asked = { model, tools, stopWhen: stepCountIs(5), prompt: "How is the weather?", maxRetries: 0 };
const loop = await generateText(asked);
say("tools, 3 turns", loop.text === "Sunny in Rome, rainy in Paris.", loop.text);
const streamed = streamText(asked);
let last = "";
for await (const part of streamed.textStream) last += part;
say("tools, 3 turns, streamed", last.endsWith("Sunny in Rome, rainy in Paris."), last);
