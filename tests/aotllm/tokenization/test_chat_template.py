"""Chat templates: what they may rely on, how they fail, and what they cannot do."""

from __future__ import annotations

from datetime import datetime

import pytest

from aotllm.errors import InvalidRequest
from aotllm.tokenization import ChatTemplate

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{{ messages[-1].content }}"

USER = [{"role": "user", "content": "Hi"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]


@pytest.mark.parametrize(
    ("source", "messages", "options", "expected"),
    [
        (
            CHATML,
            USER,
            {},
            "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            CHATML,
            SYSTEM,
            {"add_generation_prompt": False},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
        ),
        (
            LLAMA3,
            [{"role": "user", "content": "  Hi \n"}],
            {"bos_token": "<bos>"},
            "<bos><|start|>user<|end|>\n\nHi<|eot|><|start|>assistant<|end|>\n\n",
        ),
        (LLAMA3, USER, {"add_generation_prompt": False}, "<|start|>user<|end|>\n\nHi<|eot|>"),
        (NO_SYSTEM, USER, {}, "[user]Hi"),
        (TOOLS, USER, {}, "Hi"),
        (TOOLS, USER, {"tools": [{"name": "f<é>"}, {"a": [1, None]}]}, '{"name": "f<é>"}\n{"a": [1, null]}\nHi'),
        ("{{ messages | tojson(indent=2) }}", [{"a": "ß&'"}], {}, '[\n  {\n    "a": "ß&\'"\n  }\n]'),
        ("{{ documents[0] }}{{ enable_thinking }}", USER, {"documents": ["d"], "enable_thinking": False}, "dFalse"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", USER, {}, "Hi!"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", USER, {}, "01"),
        (
            "{% set n = namespace(n=0) %}{% for m in messages %}{% set n.n = n.n + 1 %}{% endfor %}{{ n.n }}",
            SYSTEM,
            {},
            "2",
        ),
        ("  {% if true %}\n  x\n  {% endif %}\n", USER, {}, "  x\n"),  # blocks leave no blank lines or indents
        ("{% macro f(m) %}<{{ m.role }}>{% endmacro %}{{ f(messages[0]) }}", USER, {}, "<user>"),
        ("{{ bos_token }}{{ eos_token }}|", USER, {}, "|"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ 2 ** 10 }}{{ '-' * 3 }}{{ [1] + [2] }}", USER, {}, "a-0071024---[1, 2]"),
        ("{{ messages[0].nothing }}|{{ undefined_name is defined }}", USER, {}, "|False"),
    ],
)
def test_renders(source, messages, options, expected):
    assert ChatTemplate(source).render(messages, **options) == expected


def test_matches_transformers():
    """The same environment as the one that template authors write for."""
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for source in (CHATML, LLAMA3, TOOLS):
        for messages in (USER, SYSTEM):
            (reference,), _ = chat_template_utils.render_jinja_template(
                conversations=[messages],
                chat_template=source,
                add_generation_prompt=True,
                bos_token="<bos>",
                tools=None,
            )
            assert ChatTemplate(source).render(messages, bos_token="<bos>") == reference


def test_date():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (NO_SYSTEM, SYSTEM, "System role not supported"),
        (NO_SYSTEM, [*USER, *USER], "Conversation roles must alternate"),
        ("{{ messages[0].content + 1 }}", USER, "TypeError"),
        ("{{ messages[0]['content'] + 'x' }}", [{"role": "user", "content": None}], "TypeError"),
        ("{{ messages[0].missing.deeper }}", USER, "missing"),
        ("{{ 1 // 0 }}", USER, "ZeroDivisionError"),
        ("{% include 'x' %}", USER, "no loader|loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", USER, "recurs"),
    ],
)
def test_a_template_that_fails_is_an_invalid_request(source, messages, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate(source).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [None, "hi", [], ["hi"], [None], {"role": "user"}])
def test_messages_of_the_wrong_shape(messages):
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% endif %}", "{% unknown %}"])
def test_a_template_that_does_not_compile(source):
    with pytest.raises(InvalidRequest, match="does not compile"):
        ChatTemplate(source)


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute filter": "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).__mro__ }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "globals of a method": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format string": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "mutation of the request": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'system'}) }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_templates_cannot_leave_the_sandbox(name):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequest):
        ChatTemplate(ESCAPES[name]).render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


BOMBS = {
    "string repetition": "{{ 'x' * 10000000000 }}",
    "repetition the other way round": "{{ 10000000000 * 'x' }}",
    "list repetition": "{% set x = [0] * 10000000000 %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "padding": "{{ '%9999999999d' % 1 }}",
    "one long range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "range beyond a word": "{% for i in range(999999999999999999999999) %}{% endfor %}",
    "nested ranges": "{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}",
    "output": "{% set x = 'x' * 60000000 %}{{ x }}{{ x }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_templates_cannot_use_up_the_machine(name):
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(BOMBS[name]).render(USER)
