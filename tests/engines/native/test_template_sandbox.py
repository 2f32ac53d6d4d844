"""What a rendering of a chat template may take."""

from __future__ import annotations

from threading import Thread

import pytest

from sagellm.core.errors import ModelError, RequestError
from sagellm.engines.native import template_sandbox
from sagellm.engines.native.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b"}]
GROWS = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}"

LIST = "{% set list = range(9999) | list %}{% set other = range(9999) | list %}"

ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if range(99999) | list | length %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | select('equalto', -1) | first }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | reject('odd') | list | length }}{% endfor %}",
    LIST + "{% for i in list %}{% if -1 in list %}{% endif %}{% endfor %}",
    LIST + "{% for i in list %}{% if -1 is in(list) %}{% endif %}{% endfor %}",
    LIST + "{% for i in list %}{% if other == list %}{% endif %}{% endfor %}",
    LIST + "{% for i in list %}{% set x = list[1:] %}{% endfor %}",
    LIST + "{% for i in list %}{% set x = other + [i] %}{% endfor %}",
    LIST + "{% for i in list %}{% set x = list | join %}{% endfor %}",
]
LARGE = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ [1] * 10 ** 12 }}",
    "{{ 10 ** 9 * 'a' }}",
    "{{ (9 ** 99) ** 9999 }}",
    GROWS.replace("GROWN", "ns.x ~ ns.x"),
    GROWS.replace("GROWN", "ns.x + ns.x"),
    GROWS.replace("GROWN", "[ns.x, ns.x] | join"),
    GROWS.replace("GROWN", "''.join([ns.x, ns.x])"),
    GROWS.replace("GROWN", "ns.x.replace('a', 'aa')"),
    "{% set x %}{{ 'a' * 10000000 }}{% endset %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ ['a'] | map('center', 10 ** 9) | join }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "{{ (['a'] * 1000000) | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join(['a'] * 1000000) }}",
    "{{ [[1], [2]] | sum(start=[]) }}",
]


@pytest.mark.parametrize("source", [*ENDLESS, *LARGE])
def test_what_takes_too_much_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_OPERATIONS", 20_000)  # less time; the count is what is tested
    with pytest.raises(RequestError, match=r"the chat template was stopped: (it|a format)"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_the_count_is_of_one_rendering_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_OPERATIONS", 1000)
    template = ChatTemplate("{% for i in range(2800) %}.{% endfor %}", {})  # 1000 more for each message
    texts: list[str] = []
    for _ in range(3):
        thread = Thread(target=lambda: texts.append(template.render(MESSAGES).text))
        thread.start()
        texts.append(template.render(MESSAGES).text)
        thread.join()
    assert texts == ["." * 2800] * 6
    with pytest.raises(RequestError, match="stopped"):
        template.render(MESSAGES[:1])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [1] }}", "a1None[1]"),
        ("{{ [1, 'b'] | join('-') }}{{ '-'.join(['c', 'd']) }}", "1-bc-d"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user,assistant"),
        ("{{ 'a\nb' | indent(2) }}{{ 'aXb'.replace('X', '--') }}", "a\n  ba--b"),
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
            "1/2False 2/2True ",
        ),
        ("{% for x in [1, 2, 3, 4] if x is even %}{{ x }}{% else %}none{% endfor %}", "24"),
        ("{{ [1, 2] == [1, 2] and 1 in [1] and 3 not in [1] and 2 is in([2]) and 1 < 2 <= 2 }}", "True"),
        (
            "{{ messages[::-1][0].role }}{{ 'abc'[1:] }}{{ [1, 2, 3] | select('odd') | map('abs') | join }}",
            "assistantbc13",
        ),
        ("{{ [1, 2] | sum }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "31"),
        (
            "{% for x in [1, 2, 3] if x is odd %}{{ loop.index }}{{ x }}{{ loop.last }} {% endfor %}",
            "11False 23True ",
        ),
        ("{% for x in [] %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        (
            "{{ '%05d|%s' % (7, 'x') }}{{ '%.2f' | format(1.5) }}{{ '{:>3}|{}'.format(1, 2) }}",
            "00007|x1.50  1|2",
        ),
        ("{{ 3 * 2 + 2 ** 3 + 7 % 4 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "17abab[1, 2]"),
    ],
)
def test_what_templates_do_is_as_before(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(MESSAGES).text == text


@pytest.mark.parametrize(
    "source",
    ["{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
     "{% if 1 %}" * 3000 + "{% endif %}" * 3000],
)  # fmt: skip
def test_a_template_nested_too_deeply_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match="nested too deeply"):
        ChatTemplate(source, {})


def test_half_a_surrogate_pair_in_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match="half a surrogate pair"):
        ChatTemplate("{{ '\\ud800' }}", {}, ["<s>"])
