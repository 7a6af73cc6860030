# SPDX-License-Identifier: Apache-2.0
"""The library's Jinja is Jinja's: expressions, statements and white space beside jinja2 as transformers sets it up, and hostile templates."""

import random
import time

import conftest
import pytest
import transformers
from data_probe import DataProbe, ProbeError
from test_chat_template import compare
from transformers.utils.chat_template_utils import _compile_jinja_template

USER = [
    {
        "role": "user",
        "content": 'Größe 漢字 it\'s "x"',
        "n": 3,
        "f": 2.5,
        "none": None,
        "flags": [True, False],
        "d": {"b": 1, "a": [1, {"c": 2}]},
    }
]


@pytest.fixture(scope="module")
def probe():
    ours = DataProbe(conftest.BUILD)
    yield ours
    ours.close()


EXPRESSIONS = """
1 + 2 * 3 - 4 // 3 ~ 'x' | 7 / 2 | -7 // 2 | -7 % 3 | 7 % -3 | 2 ** 3 ** 2 | 2 ** -1 | -2 ** 2 | 1.0 | 1e20 | 1e-5 | 123456789.123 | 0.1 + 0.2 | 5 / 5 | true + 1
'a' 'b' | 'a' * 3 | 'tab\\t\\x41\\u00e9\\'' | "it's" | 'a' ~ 1 ~ none ~ true ~ 2.5 | '%s-%d' % ('a', 3) | 'x%%' % () | '{} {1} {k}'.format(1, 2, k=3) if false else '{}{}'.format(1, 'b')
m.content | m['content'] | m.content[0] | m.content[-1] | m.content[2:5] | m.content[::-1] | m.content[:-3] | m.content | length | m.content[99] | m.content[::2]
m.d | m.d.a[1].c | m['d']['a'] | m.d.items() | list | m.d.keys() | list | m.d.values() | list | m.d.get('x') | m.d.get('x', 7) | m.d.b | m.none | m.missing | m.flags | m.n is odd
[1, 'a', none, [2.0], {'k': ('t',)}] | (1, 2) | (1,) | () | {} | {'a': 1, 'b': {'c': none}} | [1, 2] + [3] | (1,) + (2,) | [3, 1, 2] | sort | ['b', 'A'] | sort | ['b', 'A'] | sort(case_sensitive=true) | [1, 2, 1] | unique | list
1 < 2 < 3 | 1 < 3 < 2 | 'a' < 'b' | 1 == 1.0 | 1 == true | 'a' == 1 | none == none | [1] == [1] | (1,) == [1] | 'b' in 'abc' | 2 in [1, 2] | 'b' in m.d | 'z' not in m.d | not true | not 0 | x is defined | not x is defined | m is mapping
true and 'a' | '' or 'b' | none or 0 | 0 and 1 | 'a' if true | 'a' if false | 'a' if false else 'b' | 'a' if true else 'b' if true else 'c' | (1 if m.n > 2 else 0) + 1 | not false and false
m.content | upper | trim if false else 'abc' | upper | 'aBc' | capitalize | 'don\\'t stop-me (now)' | title | 'don\\'t' .title() | ' a ' | trim ~ '|' | 'xxaxx' | trim('x') | 'a,b,c'.split(',') | 'a b  c'.split() | 'a,b,c'.split(',', 1) | 'a,b,c'.rsplit(',', 1)
'  a '.strip() ~ '.' | 'xa'.lstrip('x') | 'ax\\n'.rstrip('\\n') | 'abc'.startswith('a') | 'abc'.endswith(('x', 'c')) | 'a-b'.replace('-', '+') | 'aaa'.replace('a', 'b', 2) | 'abc'.find('c') | 'abc'.find('z') | 'aXbX'.count('X') | ','.join(['a', 'b']) | 'a\\nb\\r\\nc'.splitlines()
[1, 2, 3] | first | [] | first | [1, 2] | last | [1, 2] | join(', ') | ['a', 'b'] | map('upper') | list | [{'r': 1}, {'r': 2}] | map(attribute='r') | list | [{'r': 1}, {'r': 2}] | selectattr('r', 'equalto', 2) | list | [0, 1, 2] | select | list | [1, 2, 3] | reject('odd') | list
m | tojson | m | tojson(indent=2) | m | tojson(ensure_ascii=true) | m | tojson(sort_keys=true) | m | tojson(separators=(',', ':')) | [] | tojson(indent=2) | '</script>' | tojson | '\\x07\\x7f\\u2028' | tojson | 1.5 | tojson | 1e400 if false else 1.0 | tojson
range(3) | list | range(1, 7, 2) | list | range(3, 0, -1) | list | dict(a=1) | m.d | dictsort | m.d | items | list | 'ab' | list | 3 | string ~ 'x' | '12' | int + 1 | 'x' | int | '1.5' | float | 2.5 | round | 3.14159 | round(2) | -3 | abs | [1, 5, 3] | max | [] | max | [1, 2] | sum
x | default('d') | '' | default('d', true) | none | default('d') | x.y is defined if x else 'no' | x is none | none is none | m.n is number | true is number | 1 is integer | true is integer | 1.0 is float | 'a' is string | [] is iterable | 'a' is sequence | m is sequence | 4 is divisibleby 2 | 3 is even | true is true | 1 is true | m.n is sameas 3
'a\\nb' | indent(2) | 'a\\n\\nb' | indent(2, true) | '<a>' | e | [3, 1] | reverse | list | 'abc' | reverse | 'a' | safe | namespace(a=1).a | [[1, 2], [3]] | map('first') | list | m.content.split(' ')[-1] | loop is defined | raise_exception is defined | m.content is in [m.content] | 'A' is upper | 'a' is lower
'\\u00a0a\\u2003' | trim | 'a\\x1fb'.split() | '\\u00e9' | length | '漢字'[1] | ['é'] | {'é': 'ü'} | '\\u200b' ~ ['\\u200b', '\\x85'] | 'x'.join('abc') | ''.join([]) | 'abc'[1:][0] | 'a.b'.partition('.') | 'abc'.removeprefix('a') | '12'.isdigit() | 'a1'.isalpha()
""".strip()


def theirs(source, **variables):
    return _compile_jinja_template(source).render(messages=USER, bos_token="<s!>", eos_token="</e!>", tools=None, **variables)


def ours(probe, source):
    return bytes.fromhex(probe.ask("render", source=source, bos="<s!>", messages=USER)["text"]).decode()


def both(probe, source):
    """Both texts, with None for a refusal."""
    try:
        want = theirs(source)
    except Exception:  # every error of Python is one of the template
        want = None
    try:
        got = ours(probe, source)
    except ProbeError:
        got = None
    return want, got


def expressions():
    """A line's expressions stand between bars, which filters have too: every run of them is one."""
    for line in EXPRESSIONS.splitlines():
        parts = line.split(" | ")
        for i in range(len(parts)):
            for j in range(i + 1, min(i + 4, len(parts)) + 1):
                yield " | ".join(parts[i:j])


def test_an_expression_is_worth_what_it_is_in_python(probe):
    source = "{%- set m = messages[0] -%}"
    compared = 0
    for expression in dict.fromkeys(expressions()):
        template = source + "{{ " + expression + " }}"
        try:
            want = theirs(template)
        except Exception:
            want = None
        if " at 0x" in (want or "") or (want or "").startswith("range("):  # no template writes these
            continue
        try:
            got = ours(probe, template)
        except ProbeError as error:
            got = None
            assert want is None or "not computed here" in str(error) or "not known here" in str(error), (
                expression,
                want,
                str(error),
            )
            continue
        assert got == want, (expression, want, got)
        compared += 1
    assert compared > 250


STATEMENTS = [
    "{% for x in [1, 2, 3] %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }}{{ loop.length }},{% endfor %}",
    "{% for x in [1, 2, 3] if x != 2 %}{{ loop.index0 }}{{ x }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% else %}none{% endfor %}{% for x in [] %}{% else %}none{% endfor %}",
    "{% for c in 'häy' %}{{ c }}.{% endfor %}{% for x in missing %}x{% else %}nothing{% endfor %}{% for k in {'z': 1} %}{{ k }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = 9 %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 5 %}{% endif %}{{ x }}",
    "{% set ns = namespace(a=0) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b is defined }}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in [1] %}{% for j in [1, 2] %}{{ loop.index }}{{ loop.depth }}{% endfor %}{{ loop.depth }}{% endfor %}",
    "{% macro f(a, b=2, c='x') %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, c=3) }}{{ f(1, 2, 3) }}{{ f() }}{{ f(b=f(9)) }}",
    "{% macro deep(n) %}{{ n }}{% if n > 0 %}{{ deep(n - 1) }}{% endif %}{% endmacro %}{{ deep(3) }}{% set y = 4 %}{% macro g() %}{{ y }}{% endmacro %}{% set y = 5 %}{{ g() }}",
    "{% macro outer() %}<{{ caller() }}>{% endmacro %}{% call outer() %}in{% endcall %}{% macro each(l) %}{% for i in l %}{{ caller(i) }}{% endfor %}{% endmacro %}{% call(i) each([1, 2]) %}-{{ i }}{% endcall %}",
    "{% set t %} a {{ 1 + 1 }} {% endset %}[{{ t }}]{% set u | trim | upper %} b {% endset %}[{{ u }}]{% filter upper %}q{{ 'r' }}{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% set a = 7 %}{{ a }}{% endwith %}{{ a }}",
    "{% set a, b = [1, 2] %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}{% for a, (b) in [[1, 2]] %}{{ a }}{{ b }}{% endfor %}",
    "{% if false %}a{% elif none %}b{% elif 'x' %}c{% else %}d{% endif %}{% if 1 %}{% if 0 %}{% else %}e{% endif %}{% endif %}",
    "{% generation %}a{% set q = 1 %}{% endgeneration %}{{ q is defined }}{% raw %}{{ x }}{% {% endraw %}{# note #}|",
    "{% for m in messages %}{{ m.role }}{{ m.items is defined }}{{ m.keys() | list | length }}{% endfor %}{{ messages | length }}",
    "{{ 'abc'[::9223372036854775807] }}{{ 'abc'[::-9223372036854775807] }}{{ [1, 2][-9223372036854775807:] }}{{ range(0, 9223372036854775807, 4611686018427387904) | list }}",
    "{% set ns = namespace() %}{% set ns.me = ns %}{% macro f() %}m{% endmacro %}{% set ns.f = f %}{{ ns.f() }}{{ ns.me.f() }}",
    "{{ dict({'a': 1}, z=2) }}{{ namespace({'a': 1}, b=2).a }}{{ (-9223372036854775807 - 1) is divisibleby(-1) }}",
    "{% if messages | selectattr('role', 'equalto', 'tool') %}T{% endif %}{% set g = [1, 2] | map('string') %}{{ g | join }}{{ g | join }}",
    "{{ ([1] | reject('odd'))[0] is defined }}{{ [1, 2] | reverse | first }}{% if [] | map('upper') %}lazy{% endif %}",
    "{{ [1] | select | length }}", "{{ 'ab' | reverse }}{{ {'a': 1} | items | list }}{{ [1, 1] | unique | list }}",
    "{% set ns = namespace(f=false) %}{% for m in [1, 2] if not ns.f %}{% set ns.f = true %}{{ m }}{% else %}none{% endfor %}",
    "{% set ns = namespace(f=false) %}{% for m in [1, 2] if ns.f %}{{ m }}{% else %}none{% endfor %}",
    "{{ 'a b  '.split(none, 1) }}{{ '  a b'.rsplit(none, 1) }}{{ 'a\r\nb\x0bc' | indent(2) }}{{ 3 | round }}{{ 2.675 | round(2) }}{{ 2.5 | round }}",
    "{{ '+1.5' | float }}{{ '+7' | int }}{{ -0.0 }}{{ '' | indent(2, true) }}{{ 'a' | indent(2, true, true) }}",
    "{{ x.y }}", "{{ none + 1 }}", "{{ 'a' + 1 }}", "{{ raise_exception('no') }}", "{{ f() }}", "{{ [1, 2].append(3) }}", "{{ 1 / 0 }}", "{{ [] < 1 }}",
    "{{ x + 'a' }}", "{{ ''.__class__ }}", "{{ messages.x.y }}", "{% for a in 5 %}{% endfor %}", "{{ none | length }}", "{% set a, b = [1] %}", "{{ range(10 ** 9) }}",
    "{{ bos_token }}{{ eos_token ~ '!' }}{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ add_generation_prompt is defined }}",
]  # fmt: skip


@pytest.mark.parametrize("source", STATEMENTS)
def test_a_statement_writes_what_jinja2_writes(probe, source):
    variables = {"documents": None, "add_generation_prompt": False}
    try:
        want = theirs(source, **variables)
    except Exception:
        want = None
    try:
        got = ours(probe, source)
    except ProbeError:
        got = None
    assert got == want


def test_white_space_around_tags_is_that_of_jinja2(probe):
    rng = random.Random(3)
    tags = ["{% if true %}", "{%- if true %}", "{% if true -%}", "{%+ if true +%}", "{%- if true -%}"]
    inner = [
        "{{ 1 }}",
        "{{- 1 }}",
        "{{ 1 -}}",
        "{{+ 1 }}",
        "{# c #}",
        "{#- c -#}",
        "{#+ c +#}",
        "{% raw %} {{ {% endraw %}",
        "{%- raw -%} \n x {%- endraw -%}",
        "a",
        "b\n",
    ]
    space = ["", " ", "\n", "\n  ", "  \n", "\t\n\n ", "\r\n", "\r  \n"]
    ends = ["{% endif %}", "{%- endif %}", "{% endif -%}", "{%+ endif %}", "{% endif +%}"]
    for _ in range(1500):
        parts = [rng.choice(space), rng.choice(tags)]
        for _ in range(rng.randint(1, 4)):
            parts += [rng.choice(space), rng.choice(inner), rng.choice(space)]
        source = "".join([*parts, rng.choice(ends), rng.choice(space)])
        want, got = both(probe, source)
        assert got == want, source


def test_damaged_templates_are_read_as_jinja2_reads_them_or_refused(probe):
    """A template that is damaged gives the same text or is refused: never another text, and never a crash."""
    rng = random.Random(9)
    whole = [
        *STATEMENTS[:17],
        "{%- set m = messages[0] -%}{{ m.content | upper if m.n > 2 and m.f < 3 else m.d['b'] ~ [1, 2][0] }}",
    ]
    for _ in range(1500):
        source = rng.choice(whole)
        i = rng.randrange(len(source))
        source = source[:i] + rng.choice("{}%#'\"\\-x.|,()[]:~ \n1") * rng.randint(0, 1) + source[i + rng.randint(0, 2) :]
        want, got = both(probe, source)
        assert got is None or got == want, source


@pytest.mark.parametrize(
    "source, rule",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 10000000 steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "call each other more than 100 times"),
        ("{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "the text is too long"),
        ("{% set a = 'x' * 9999999 %}{% for i in range(99999) %}{% set b = a | replace('x', 'y') %}{% endfor %}", "more than 10000000 steps"),
        ("{{ 'a' * 99999999999 }}", "the text is too long"),
        ("{{ 'abc' | replace('', 'x' * 9999999) | replace('x', 'y' * 999) }}", "the text is too long"),
        ("{{ " + "(" * 1000 + ")" * 1000 + " }}", "more than 200 levels"),
        ("{{ " + "-" * 100000 + "1 }}", "more than 200 levels"),
        ("{% if true %}" * 1000, "more than 200 levels"),
        ("{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}", "beyond 200 levels"),
        ("{% set ns = namespace(l={}) %}{% for i in range(99999) %}{% set ns.l = {'a': ns.l} %}{% endfor %}", "beyond 200 levels"),
        ("{% macro f(n) %}{{ " + "(" * 20 + "f(n)" + ")" * 20 + " }}{% endmacro %}{{ f(1) }}", "more than 100 times"),
        ("{% macro f(n) %}{{ " + "not " * 90 + "f(n) }}{% endmacro %}{{ f(1) }}", "more than 3000 expressions and calls"),
        ("{% set ns = namespace() %}{% for i in range(9999) %}{% set ns.n = namespace(p=ns.n) %}{% endfor %}", "beyond 200 levels"),
        ("{% set ns = namespace(d={}) %}{% for i in range(9999) %}{% set ns.d = {'a': ns.d}.get %}{% endfor %}", "beyond 200 levels"),
        ("{% set ns = namespace(l=[]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}", "the text is too long"),
        ("{% set ns = namespace(l=[]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}", "the text is too long"),
        ("{% set a = namespace(l=[1], k=[1]) %}{% for i in range(60) %}{% set a.l = [a.l, a.l] %}{% set a.k = [a.k, a.k] %}{% endfor %}{{ a.l == a.k }}", "compares too many"),
        ("{% for c in 'x' * 60000000 %}{% break %}{% endfor %}", "more than 10000000 steps"),
        ("{{ 1" + "+1" * 100000 + " }}", "more than 200 levels"),
        ("{% if false %}{{ 1" + " | trim" * 100000 + " }}{% endif %}", "more than 200 levels"),
        ("{{ x" + " or x" * 100000 + " }}", "more than 200 levels"),
        ("{{ x" + " if 1" * 100000 + " }}", "more than 200 levels"),
        ("{{ x" + " ~ x" * 100000 + " ** x" * 100000 + " }}", "more than 200 levels"),
        ("{{ ('a' | safe) + '<' }}", "'\\+' behind the filter 'safe'"),
        ("{% for i in [1] %}{% set q %}{% break %}{% endset %}{% endfor %}", "'break' stands in no loop"),
        ("{{ '%d' % 1e300 }}", "cannot be interpreted as an integer"),
        ("{{ 9 ** 99 }}", "beyond 64 bits"),
        ("{{ (-9223372036854775807 - 1) // -1 }}", "beyond 64 bits"),
        ("{{ (-9223372036854775807 - 1) | abs }}", "beyond 64 bits"),
        ("{{ ns.x", "a tag without its end"),
        ("{% if true %}a", "'endif' is missing"),
        ("{% bogus %}", "the unknown tag 'bogus'"),
        ("{{ 'a' | bogus }}", r"the filter 'bogus', which is not computed here. Choose another with --chat_template"),
        ("{% include 'x' %}", r"\{% include %\}, which is not computed here"),
        ("{{ 'Ä' | lower }}", "are not known here"),
    ],
)  # fmt: skip
def test_what_is_hostile_or_unknown_is_refused_by_rule_and_soon(probe, source, rule):
    begin = time.monotonic()
    with pytest.raises(ProbeError, match=rule):
        probe.ask("render", source=source, bos="", messages=USER)
    assert time.monotonic() - begin < 30


def test_transformers_adds_nothing_that_templates_see_here_under_another_name(probe):
    source = "{% for name in ['bos_token', 'eos_token', 'pad_token', 'messages', 'tools', 'documents', 'add_generation_prompt'] %}{{ name }}{% endfor %}"
    source += "{{ pad_token is defined }}{{ strftime_now is defined }}{{ date_string is defined }}"
    assert compare(probe, source, [{"role": "user", "content": "x"}], False) is not None
    assert transformers.__version__
