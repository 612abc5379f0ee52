"""The store, its budget and its evictor hold their invariants whatever is done to them."""

from tests.helpers.worker.extent_store_machine import Caching

TestCaching = Caching.TestCase
