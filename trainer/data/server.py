"""Answers by a server that speaks OpenAI's chat completions (vLLM, SGLang, llama.cpp): many rows at once.

What may pass by itself (connection lost, 408, 429, 5xx) is tried again, later each time. What concerns one
row (400, 413, 422, no text in the answer) fails that row. What concerns them all (no access, no such model, a
server that has gone) ends the run, which goes on later.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainer import needs
from trainer.data.journal import Result
from trainer.data.regenerate import Answer, Job, Refused, Sampling, row_seed
from trainer.errors import ConfigError, DataError
from trainer.words import printable

try:
    import httpx2
except ImportError:  # said when a server is asked for
    httpx2 = None  # type: ignore[assignment]

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
OF_THE_ROW = frozenset({400, 413, 422})
LONGEST_WAIT_S = 60.0
CONNECT_S = 10.0
AHEAD = 4  # rows under way or waiting for an earlier one, in times of `concurrency`


@dataclass(frozen=True)
class ServerSettings:
    url: str  # up to /v1
    model: str
    concurrency: int = 32
    tries: int = 6
    timeout_s: float = 600.0
    first_wait_s: float = 0.5
    key_env: str | None = None  # the NAME of the environment variable that holds the key
    thinking: bool | None = None
    arguments: dict[str, Any] | None = None  # further variables of the chat template


class Gone(DataError):
    """The server does not answer any more."""


def key_from(name: str | None) -> str | None:
    """The key, which is never shown, stored or passed on a command line.

    Raises:
        ConfigError: no such variable.
    """
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key:
        raise ConfigError(
            "is not set in the environment", where=f"--key-env {name}", next=f"export {name}=..."
        )
    return key


class Server:
    """Asks one server.

    Raises:
        ConfigError: the client's package is missing, or the key is.
    """

    def __init__(self, settings: ServerSettings, sampling: Sampling) -> None:
        if httpx2 is None:
            raise ConfigError("the package httpx2 is missing", next=needs.install("httpx2"))
        if not settings.url.startswith(("http://", "https://")):
            raise ConfigError(f"{settings.url!r} does not begin with http:// or https://", where="--server")
        self.settings, self.sampling = settings, sampling
        key = key_from(settings.key_env)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._chance = random.Random()  # spreads the retries; decides no answer
        self.retries = 0

    def answering(self) -> Callable[[Iterator[Job | Result], Callable[[int], None]], Iterator[Result]]:
        """For `regenerate`."""

        def answer(rows: Iterator[Job | Result], told: Callable[[int], None]) -> Iterator[Result]:
            # Requests go on while this process waits for the next result in order.
            with asyncio.Runner() as runner:
                stream = self._stream(rows, told)
                try:
                    while (result := runner.run(_next(stream))) is not None:
                        yield result
                finally:
                    runner.run(stream.aclose())

        return answer

    async def _stream(
        self, rows: Iterator[Job | Result], told: Callable[[int], None]
    ) -> AsyncGenerator[Result]:
        concurrency = self.settings.concurrency
        slots = asyncio.Semaphore(concurrency)
        waiting: deque[Result | asyncio.Task[Result]] = deque()
        self._told, self._under_way = told, 0
        async with httpx2.AsyncClient(
            headers=self._headers,
            timeout=httpx2.Timeout(self.settings.timeout_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=concurrency),
        ) as client:
            try:
                while True:
                    while len(waiting) < AHEAD * concurrency and (row := next(rows, None)) is not None:
                        if isinstance(row, Job):
                            waiting.append(asyncio.create_task(self._row(client, slots, row)))
                        else:
                            waiting.append(row)
                    if not waiting:
                        return
                    first = waiting[0]
                    result = first if isinstance(first, Result) else await first
                    waiting.popleft()
                    if not isinstance(first, Result):
                        self._under_way -= result.tokens
                    yield result
            finally:
                tasks = [each for each in waiting if isinstance(each, asyncio.Task)]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _row(self, client: Any, slots: asyncio.Semaphore, job: Job) -> Result:
        while (prompt := job.next_prompt()) is not None:
            async with slots:
                before = job.tokens
                try:
                    job.answered(await self._ask(client, job, prompt))
                except Refused as error:
                    job.refused = error
                self._under_way += job.tokens - before
            self._told(self._under_way)
        return job.result()

    def _request(self, job: Job, prompt: list[dict[str, Any]]) -> dict[str, Any]:
        settings, sampling = self.settings, self.sampling
        # The template's own name for thoughts is a second copy, which servers do not know.
        messages = [{key: each[key] for key in each if key != "thinking"} for each in prompt]
        request: dict[str, Any] = {
            "model": settings.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": row_seed(sampling.seed, job),
        }
        if sampling.top_p < 1:
            request["top_p"] = sampling.top_p
        if sampling.top_k:
            request["top_k"] = sampling.top_k
        if job.tools:
            request["tools"] = job.tools
        variables = dict(settings.arguments or {})
        if settings.thinking is not None:
            variables["enable_thinking"] = settings.thinking
        if variables:
            request["chat_template_kwargs"] = variables
        return request

    async def _ask(self, client: Any, job: Job, prompt: list[dict[str, Any]]) -> Answer:
        """One answer.

        Raises:
            Refused: none for this row. ConfigError: none for any row. Gone: not now.
        """
        settings, request = self.settings, self._request(job, prompt)
        url = settings.url.rstrip("/") + "/chat/completions"
        problem, lost = "", False
        for attempt in range(settings.tries):
            wait = None
            try:
                response = await client.post(url, json=request)
            except httpx2.TransportError as error:
                problem, lost = f"{type(error).__name__} {error}".strip(), True
            else:
                lost = False
                if response.status_code in AGAIN:
                    problem = f"HTTP {response.status_code}"
                    wait = _seconds(response.headers.get("retry-after"))
                elif response.status_code in OF_THE_ROW:
                    raise Refused(f"the server refuses it: HTTP {response.status_code} {_said(response)}")
                elif response.status_code != 200:
                    raise ConfigError(
                        f"HTTP {response.status_code} {_said(response)}",
                        where=url,
                        next="check --server, --model and --key-env; the same command goes on from here",
                    )
                else:
                    try:
                        return _answer(response.json())
                    except (ValueError, KeyError, IndexError, TypeError):
                        problem = "the answer is not a chat completion"
            if attempt + 1 < settings.tries:
                self.retries += 1
                await asyncio.sleep(self._wait(attempt) if wait is None else min(wait, LONGEST_WAIT_S))
        if lost:
            raise Gone(
                f"no answer after {settings.tries} tries: {problem}",
                where=url,
                next="the same command goes on from here when the server is there again",
            )
        raise Refused(f"{problem} at each of {settings.tries} tries")

    def _wait(self, attempt: int) -> float:
        """Twice as long each time, and not all rows at once."""
        return min(LONGEST_WAIT_S, self.settings.first_wait_s * 2**attempt) * self._chance.uniform(0.5, 1.5)


async def _next(stream: AsyncGenerator[Result]) -> Result | None:
    return await anext(stream, None)


def _answer(value: Any) -> Answer:
    choice = value["choices"][0]
    message, reason = choice["message"], choice.get("finish_reason")
    tokens = int((value.get("usage") or {}).get("completion_tokens") or 0)
    if reason == "length":
        raise Refused("cut off before its end (--max-new-tokens, or the context)", "skipped")
    if reason not in ("stop", None):
        raise Refused(f"ended by {reason}", "skipped")
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError("content")
    if not content.strip():
        raise Refused("the target says nothing", "skipped")
    thought = next((message[key] for key in ("reasoning_content", "reasoning") if message.get(key)), None)
    thought = thought if isinstance(thought, str) else None
    try:
        f"{content}{thought}".encode()
    except UnicodeEncodeError:
        raise Refused("the answer holds half a surrogate pair, which is no text") from None
    return Answer(content, tokens, thought)


def _seconds(value: str | None) -> float | None:
    """A Retry-After in seconds; None for a date, nonsense or nothing."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _said(response: Any) -> str:
    """The server's own message, short and on one line."""
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        text = response.text
    return printable(" ".join(str(text).split())[:200])
