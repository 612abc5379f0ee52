"""A checkpoint's chat template that does not end holds neither a start nor a request."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from hearth.shared.errors import StartError
from hearth.worker.prompt import awaited_work, bounded_templates
from hearth.worker.prompt.awaited_work import ClientLeft, while_client_waits
from hearth.worker.prompt.chat_template import Template
from scripts.harness.model_families import bare_tokenizer, family

assert bounded_templates.PRODUCT_SIZE_MAX == 1 << 20, "imported: it changes transformers' sandbox"

TWICE = "{{ f(n - 1) }}{{ f(n - 1) }}"
# Each takes some seconds where nobody stops it, so that a fault fails instead of hanging.
ENDLESS = {
    "loops": "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}",
    "a loop that shows what it loops over": "{% for a in range(9999) %}"
    "{% for b in range(99) %}{{ b }}{% endfor %}{% endfor %}",
    "a filtered loop": "{% set c = cycler(1, 2) %}{% for a in range(99) %}"
    "{% for b in range(9999) if c.next() == 3 %}{% endfor %}{% endfor %}",
    "a loop within itself": "{% for a in [1, 1] recursive %}"
    "{% if loop.depth < 17 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}" + TWICE + "{% endif %}{% endmacro %}{{ f(16) }}",
    "a macro without a word": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}"
    "{% set b = f(n - 1) %}{% endif %}{% endmacro %}{% set c = f(16) %}",
    "a counter in a namespace": "{% set s = namespace(n=0) %}{% for a in range(9999) %}"
    "{% for b in range(99) %}{% set s.n = s.n + 1 %}{% endfor %}{% endfor %}",
    "loops of filters": "{% for a in range(99) %}"
    "{% set b = range(99999) | map('string') | select | list %}{% endfor %}",
    "costly passes": "{% set l = range(99999) | list %}"
    "{% for a in range(299) %}{% set b = -1 in l %}{% endfor %}",
}


class Client:
    """Somebody who waits until `left` questions were asked."""

    def __init__(self, left: int = 10**9) -> None:
        self.left = left

    @property
    def is_gone(self) -> bool:
        self.left -= 1
        return self.left < 0


def rendered(source: str, client: Client) -> str:
    template = chat_template_utils._compile_jinja_template(source)
    with while_client_waits(client):
        return str(template.render(messages=[]))


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_ended(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited_work, "RENDER_S_MAX", 0.05, raising=False)
    with pytest.raises(StartError, match="chat template has computed"):
        rendered(source, Client())
    with pytest.raises(ClientLeft):  # a worker that is to stop, or a request's client
        monkeypatch.setattr(awaited_work, "RENDER_S_MAX", 1e9, raising=False)
        rendered(source, Client(20))
    assert rendered("{{ 1 + 1 }}", Client()) == "2", "the next one has all of its time"


@pytest.mark.parametrize(
    "source", ["{{ 'x' * n }}", "{{ n * 'x' }}", "{{ [0] * n }}", "{{ 9**n }}"]
)
def test_a_template_multiplies_nothing_to_the_size_of_the_memory(source: str) -> None:
    with pytest.raises(Exception, match="more than"):
        rendered("{% set n = 99999999 %}" + source, Client())


def test_a_template_that_does_not_end_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a probe that tells nothing."""
    monkeypatch.setattr(awaited_work, "RENDER_S_MAX", 0.05, raising=False)
    tokenizer = bare_tokenizer(family("qwen3").tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", ENDLESS["loops"])
    with pytest.raises(StartError, match="Mend the checkpoint's chat_template"):
        Template(tokenizer)


FILTERS = {
    "a number of words": "{{ lipsum(n=400) | length }}",
    "slices": "{{ ([1] | slice(3000000)) | list | length }}",
    "a power by way of a filter": "{{ 1 | round(400000, 'ceil') }}",
    "links in a long text": "{{ (')' * 9000 ~ 'a)') | urlize | length }}",
    "a text that is doubled": "{% set s = namespace(t='x') %}{% for a in range(26) %}"
    "{% set s.t = s.t ~ s.t %}{% endfor %}{{ s.t | length }}",
    "a list that is doubled": "{% set s = namespace(t=[1]) %}{% for a in range(26) %}"
    "{% set s.t = s.t + s.t %}{% endfor %}{{ s.t | length }}",
    "lists within lists": "{{ ([range(99999) | list] * 999) | tojson | length }}",
    "a text that is put for each character": "{{ ('x' * 99999).replace('x', 'y' * 9999) }}",
    "texts that are joined": "{{ (['x' * 9999] * 9999) | join }}",
    "a text that is padded": "{{ 'x' | center(9999999) | length }}",
    "a text that is formatted": "{{ '%9999999d' % 1 }}",
    "a text that formats itself": "{{ '{:>9999999}'.format(1) | length }}",
}


@pytest.mark.parametrize("source", FILTERS.values(), ids=FILTERS)
def test_a_template_does_not_end_or_grow_by_way_of_a_filter(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited_work, "RENDER_S_MAX", 0.05, raising=False)
    with pytest.raises(Exception, match=r"more than|has computed|is undefined|No filter|unsafe"):
        rendered(source, Client())


# Of a message, of a loop's own variables, within a loop, a macro and a block: Nemotron Nano 2's
# template replaces what a message says as it goes through them.
METHODS = (
    "{{ m.replace('a', n) }}{{ m.replace('a', 'b', 1) }}{{ ','.join([m, n]) }}"
    "{{ m | replace(n, 'c') }}{{ [m, n] | join('-') }}{{ m.split('a')[-1] }}"
    "{{ '%s' % n }}{{ m ~ n }}{{ '{}'.format(m) }}"
)
PLACES = {
    "loop": f"{{% for m in ['aba', 'xa'] %}}{{% set n = m[0] %}}{METHODS}{{% endfor %}}",
    "macro": f"{{% macro f(m, n) %}}{METHODS}{{% endmacro %}}"
    "{% for each in ['aa', 'b'] %}{{ f(each, each) }}{% endfor %}",
    "block": f"{{% set m, n = 'aba', 'a' %}}{{% block b scoped %}}{METHODS}{{% endblock %}}",
    "call": "{% macro f() %}{{ caller('aba', 'a') }}{% endmacro %}"
    f"{{% call(m, n) f() %}}{METHODS}{{% endcall %}}",
}


@pytest.mark.parametrize("source", PLACES.values(), ids=PLACES)
def test_a_template_may_call_methods_of_texts_wherever_it_names_them(source: str) -> None:
    found = rendered(source, Client())
    assert found and found == ImmutableSandboxedEnvironment().from_string(source).render()
