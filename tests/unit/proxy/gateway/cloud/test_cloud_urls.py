"""Only URLs of public hosts go to a cloud model: LiteLLM itself fetches some of them."""

import pytest

from hearth.proxy.gateway.cloud.cloud_urls import check_data, check_url, is_public_url
from hearth.shared.errors import RequestError

PUBLIC = (
    "https://example.com/a.png",
    "HTTPS://Example.COM/a.png?x=1#y",
    "https://cdn.example.co.uk:443/a",
    "https://8.8.8.8/a",
    "https://[2606:4700:4700::1111]/a",
)
PRIVATE = (
    *("http://example.com/a.png", "https://example.com:8443/a", "https://user@example.com/a"),
    *("https://user:pw@example.com/", "https://localhost/a", "https://router.local/a"),
    *("https://db.internal/", "https://host.docker.internal./a", "https://intranet/a"),
    *("https://127.0.0.1/a", "https://10.0.0.8/a", "https://169.254.169.254/latest/meta-data"),
    *("https://127.1/", "https://2130706433/", "https://0x7f.0.0.1/", "https://0177.0.0.1/"),
    *("https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://[fe80::1%25eth0]/"),
    *("https://[64:ff9b::7f00:1]/", "https://example.com\\@127.0.0.1/", "https://ex ample.com/"),
    *("https://exämple.com/", "https://example.com:x/", "https:///a", "https://", ""),
    *("file:///etc/passwd", "gs://bucket/a", "s3://bucket/a", "ftp://example.com/a"),
    *("//example.com/a", "https://example.com/" + "a" * 5_000),
)


@pytest.mark.parametrize("url", PUBLIC)
def test_a_public_host_passes(url: str) -> None:
    assert is_public_url(url)
    check_url(url, "p")


@pytest.mark.parametrize("url", PRIVATE)
def test_anything_else_is_refused_with_its_place_and_a_remedy(url: str) -> None:
    assert not is_public_url(url)
    with pytest.raises(RequestError) as caught:
        check_url(url, "messages[0].content[1].image_url.url")
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert "data: URL" in str(caught.value)
    assert len(url) < 9 or url not in str(caught.value)


def test_data_passes_bare_or_as_a_url() -> None:
    check_url("data:image/png;base64,iVBO", "p")
    for data in ("iVBORw0KGgo=", "data:application/pdf;base64,JVBE"):
        check_data(data, "p")
    for url in ("http://169.254.169.254/", " gs://bucket/x"):
        with pytest.raises(RequestError):
            check_data(url, "p")
