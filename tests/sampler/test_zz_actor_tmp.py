import asyncio, time
from conftest import tiny_model, weights_of
from prl.actor.sampler_client import SamplerClient
from prl.domains.api import SamplerError


def test_actor_client(lab):
    lab.connect()
    lab.update(weights_of(tiny_model(0)))

    async def go():
        async with SamplerClient(lab.token, request_s=60, max_model_len=1024, max_answers=32) as c:
            c.set_replicas({0: lab.url})
            s = c.sampler(5, 1.0, 1.0)
            turns = await asyncio.gather(*(s.generate([3, 1, 9, 4, 10]) for _ in range(20)), s.generate([1, 2]))
            for t in turns[:3]:
                print(t)
            print(turns[-1])
            # 400
            try:
                await s.generate([1], temperature=-1.0)
            except SamplerError as e:
                print(repr(e))
            # abort: long answer, then abort everything
            long = asyncio.create_task(s.generate([1, 2, 3], max_tokens=900))
            long2 = asyncio.create_task(s.generate([1, 2, 4], max_tokens=900, stop_token_ids=[3]))
            await asyncio.sleep(0.15)
            r = await asyncio.to_thread(lab.request, "POST", "/abort_requests", {"request_ids": []})
            print("abort", r)
            r = await asyncio.to_thread(lab.request, "POST", "/pause?mode=abort")
            print("pause", r)
            await asyncio.sleep(0.5)
            r = await asyncio.to_thread(lab.request, "POST", "/resume")
            print("resume", r, c.counts)
            t = await long
            print(len(t.output_ids), t.finish_reason, t.versions, c.counts)
            t = await long2
            print(len(t.output_ids), t.finish_reason, t.versions, c.counts)
            t0 = time.process_time()
            w = time.time()
            await asyncio.gather(*(s.generate([k % 10, k // 10 % 10, 9, 4, 10]) for k in range(512)))
            print("512 n=1 client cpu", time.process_time() - t0, time.time() - w)

    asyncio.run(go())
