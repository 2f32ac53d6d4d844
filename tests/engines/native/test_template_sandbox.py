"""What a rendering of a chat template may take."""

from __future__ import annotations

import copy
import json
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


SHARED = """{% set ns = namespace(x=[1, 2], t=(1, 2), d={'a': 1}, y=[1, 2]) %}{% for i in range(DEPTH) %}
{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% set ns.t = (ns.t, ns.t) %}
{% set ns.d = {'a': ns.d, 'b': ns.d} %}{% endfor %}"""
THROUGH_ALL = [
    "{{ ns.x }}",
    "{{ ns.t }}",
    "{{ ns.d }}",
    "{{ ns.d.values() }}",
    "{{ ns.d.items() | list }}",
    "{{ dict(a=ns.x) }}",
    "{{ ns.x | string | length }}",
    "{{ ns.x | tojson | length }}",
    "{{ ns.d | tojson(indent=2) | length }}",
    "{{ (ns.x ~ '') | length }}",
    "{% set text %}{{ ns.x }}{% endset %}",
    "{{ '%s' % ns.x }}",
    "{{ '%s' % (ns.d,) }}",
    "{{ '%s' | format(ns.x) }}",
    "{{ '{}'.format(ns.x) }}",
    "{{ '{a}'.format_map({'a': ns.x}) }}",
    "{{ [ns.x] | join }}",
    "{{ [ns.x] | map('string') | join }}",
    "{{ ns.x | trim }}",
    "{{ ns.x | upper }}",
    "{{ ns.x | replace('a', 'b') }}",
    "{{ 'a' | replace('a', ns.x) }}",
    "{{ {'a': ns.x} | xmlattr }}",
    "{{ ns.x is lower }}",
    "{{ ns.x == ns.y }}",
    "{{ ns.x != ns.y }}",
    "{{ ns.x < ns.y }}",
    "{{ [1] == [1] == ns.x }}",
    "{{ ns.x is eq ns.y }}",
    "{{ ns.x is lt ns.y }}",
    "{{ ns.x in [ns.y] }}",
    "{{ ns.x is in [ns.y] }}",
    "{{ ns.x in [ns.y] | map('list') }}",
    "{{ [ns.x] | select('eq', ns.y) | list | length }}",
    "{{ [[ns.x]] | selectattr(0, 'eq', ns.y) | list | length }}",
    "{{ [ns.y].index(ns.x) }}",
    "{{ [ns.y].count(ns.x) }}",
    "{{ [ns.x, ns.y] | sort | length }}",
    "{{ [ns.x, ns.y] | max | length }}",
    "{{ [ns.t] | unique | list | length }}",
    "{{ [{'a': ns.x}, {'a': ns.y}] | groupby('a') | length }}",
    "{{ {ns.t: 1} | length }}",
    "{{ {}[ns.t] }}",
    "{{ {}.get(ns.t) }}",
    "{{ ns.t in {} }}",
    "{{ ns.t is filter }}",
    "{{ dict([(ns.t, 1)]) | length }}",
    "{{ namespace([(ns.t, 1)]) }}",
    "{{ [][ns.x].a }}",
    "{{ raise_exception(ns.x) }}",
    "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(ns.x) }}",
    "{% for i in [ns.x, ns.y] %}{% if loop.changed(i) %}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("depth", [22, 300])
@pytest.mark.parametrize("use", THROUGH_ALL)
def test_lists_within_lists_count_as_often_as_they_appear(use: str, depth: int) -> None:
    """300 levels of two are more items than there are atoms; without the measure 22 are gone through."""
    with pytest.raises(RequestError, match="the chat template was stopped: it"):
        ChatTemplate(SHARED.replace("DEPTH", str(depth)) + use, {}).render(MESSAGES)


def test_what_looks_at_no_item_of_an_item_takes_shared_lists() -> None:
    uses = """{{ ns.x | length }}{{ ns.x[0] | first | length }}{{ ns.x is defined }}{{ ns }}
{% macro f(x) %}{{ x | length }}{% endmacro %}{{ f(ns.x) }}{{ (ns.x + ns.y) | length }}{{ 'a' in ns.d }}
{% for x in ns.x | reverse %}{{ x | count }}{% endfor %}{{ ns.d.get('b') | length }}{{ ns.x[:1] | length }}"""
    text = ChatTemplate(SHARED.replace("DEPTH", "300") + uses, {}).render(MESSAGES).text
    assert text.split() == ["22True<Namespace>", "24True", "2221"]


@pytest.mark.parametrize(
    "use",
    [
        "{{ '%999999999d' is odd }}",
        "{{ '%999999999d' is divisibleby(3) }}",
        "{{ 1.5 | round(99999999, 'floor') }}",
        "{{ ('\\n' * 999999) | indent('x' * 999999) }}",
        "{{ range(9999) | list | tojson(separators=('x' * 9999, ':')) }}",
        LIST + "{% set ns = namespace(x=list) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}"
        "{{ ns.x | tojson(indent=99) }}",
    ],
)
def test_filters_and_tests_with_numbers_beyond_all_measure(use: str) -> None:
    with pytest.raises(RequestError, match=r"stopped|test of numbers"):
        ChatTemplate(use, {}).render(MESSAGES)


def naive_measure(value: Any) -> tuple[int, int]:
    """The slow twin of `_measure`: goes through shared parts again."""
    if isinstance(value, str):
        return 16 + len(value), 0
    if not isinstance(value, (list, tuple, dict)):
        return 16, 0
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    found = [naive_measure(part) for part in parts]
    return 16 + sum(chars for chars, _ in found), 1 + max((depth for _, depth in found), default=0)


@st.composite
def shared_values(draw: st.DrawFn) -> Any:
    """A value whose parts are drawn from what was made before, so that many appear more than once."""
    made: list[Any] = [1, "ab", None, 1.5, True]
    for _ in range(draw(st.integers(1, 12))):
        parts = draw(st.lists(st.sampled_from(range(len(made))), max_size=3))
        values = [made[i] for i in parts]
        kinds = [values, tuple(values), {f"k{i}": value for i, value in enumerate(values)}]
        made.append(draw(st.sampled_from(kinds)))
    return made[-1]


@given(shared_values())
def test_the_measure_agrees_with_its_slow_twin(value: Any) -> None:
    sandbox = template_sandbox.TemplateSandbox()
    with sandbox.rendering():
        chars, depth = sandbox._measure(value)
        assert (chars, depth) == naive_measure(value)
        assert chars >= len(repr(value)) / 2
        assert sandbox._measure(value) == (chars, depth)


@given(shared_values(), st.sampled_from(["string", "tojson", "list"]))
def test_a_fuzz_of_filters_does_as_jinja_does(value: Any, name: str) -> None:
    source = "{{ x | FILTER | string }}{{ x == y }}{{ x in [y] }}".replace("FILTER", name)
    plain = ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = json.dumps
    wanted = plain.from_string(source)
    y = copy.deepcopy(value)
    try:
        expected = wanted.render(x=value, y=y)
    except (TypeError, UndefinedError):
        return
    options = {"x": value, "y": y}
    assert ChatTemplate(source, {}).render(MESSAGES, options=options).text == expected


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
        ("{{ 'abc' | join(',') }}{{ 'ab' | join }}", "a,b,cab"),
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
