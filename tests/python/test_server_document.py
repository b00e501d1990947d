"""The OpenAPI document says what the server does: requests made from it are answered as it says, never with 5xx."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import FakeEngine, fake_llm, running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def test_requests_made_from_the_document() -> None:
    with running(fake_llm(FakeEngine())) as server:
        schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) >= 13
        for operation in operations:

            @settings(
                max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
            )
            @given(case=operation.as_strategy())
            def ask(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict) and "model" in case.body:
                    case.body["model"] = "test"  # with any other the answer is 404 before anything is looked at
                case.call_and_validate(base_url=server.url, checks=CHECKS)

            ask()
        assert server.service.num_active == 0
