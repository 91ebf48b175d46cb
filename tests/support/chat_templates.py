"""Chat templates of known model families, and those found in the virtual environments."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM_ENVIRONMENT = ROOT / ".venv-vllm"

_ASSISTANT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
SHAPES = {
    "one text per turn": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endfor %}" + _ASSISTANT
    ),
    "trimmed, and the first system message in front": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{{ 'Cutting Knowledge Date: 2023\n\n' + system }}"
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim }}{% endfor %}" + _ASSISTANT
    ),
    "the system message folded into the last user message": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + (system + '\n\n' if system is defined and loop.last else '') + m['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "the reasoning of earlier turns left out": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>' + m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}" + _ASSISTANT
    ),
    "all system messages gathered in front": (
        "{% set ns = namespace(system='') %}{% for m in messages if m['role'] == 'system' %}"
        "{% set ns.system = ns.system + m['content'] + '\n' %}{% endfor %}{{ ns.system }}"
        "{% for m in messages if m['role'] != 'system' %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
        + _ASSISTANT
    ),
    "switches taken out": (
        "{% for m in messages %}{% set text = m.content | replace('/no_think', '') | replace('/think', '') %}"
        "{{ '<|' + m.role + '|>' + text | trim }}{% endfor %}" + _ASSISTANT
    ),
    "contents as JSON": (
        "{% for m in messages %}{{ {'role': m.role, 'output': m.content} | tojson }}{% endfor %}" + _ASSISTANT
    ),
    "a default system text": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|system|>You are a helpful assistant.' }}{% endif %}"
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'].strip() }}{% endfor %}" + _ASSISTANT
    ),
    "texts or parts": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{% if part.type == 'image' %}{{ '<image>' }}"
        "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}" + _ASSISTANT
    ),
    "parts, picked by type": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
        "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] | trim + '\n' }}"
        "{% endfor %}{% endfor %}" + _ASSISTANT
    ),
    "parts, joined without a loop": (
        "{% for m in messages %}"
        "{% set texts = m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | list %}"
        "{{ '<|' + m.role + '|>' + texts | join('\n') }}{% endfor %}" + _ASSISTANT
    ),
    "parts in a macro": (
        "{% macro shown(value) %}{% if value is string %}{{ value }}{% else %}"
        "{% for part in value %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ shown(m.content) }}{% endfor %}" + _ASSISTANT
    ),
    "parts, but the first one alone of the system message": (
        "{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}"
        "{% set system = messages[0]['content'] %}{% else %}{% set system = messages[0]['content'][0]['text'] %}"
        "{% endif %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ system }}"
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for part in m.content %}{{ part['text'] | trim }}{% endfor %}{% endif %}{% endfor %}" + _ASSISTANT
    ),
}
"""Templates of many kinds, by name. Each accepts system, user and assistant messages."""
PART_SHAPES = [name for name in SHAPES if "parts" in name]


def stored_templates() -> Iterator[Path]:
    """Yield all Jinja templates in this environment and in vLLM's; most are no chat templates."""
    places = [Path(sysconfig.get_paths()["purelib"]), *VLLM_ENVIRONMENT.glob("lib/python*/site-packages")]
    for place in dict.fromkeys(each.resolve() for each in places):
        yield from sorted(place.rglob("*.jinja"))
