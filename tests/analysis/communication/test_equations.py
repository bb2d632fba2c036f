"""Each equation against a number that was worked out by hand, in the comment above it."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.communication import equations as eq
from tests.analysis.communication.paper_flop import iteration_flop


def test_equation_1_is_the_sum_of_its_terms() -> None:
    assert eq.iteration_ms(compute_ms=100, tensor_ms=20, pipeline_ms=3, data_ms=40, bubble_ms=50) == 213


def test_equation_2() -> None:
    # 2bsh = 2 * 1 * 1024 * 2000 = 4,096,000 bytes, in a ring of 4 ranks 2 * 3/4 = 1.5 times that: 6,144,000.
    # 8 micro-batches, 48/4 = 12 layers, 6 all-reduces: 576 messages, 3,538,944,000 bytes. At 10 GB/s: 353.8944 ms.
    message = eq.activation_bytes(micro_batch=1, sequence=1024, hidden=2000)
    assert message == 4_096_000
    of = {"m": 8, "layers": 48, "p": 4, "t": 4, "message_bytes": message, "bytes_per_s": 10e9}
    assert eq.tensor_ms(**of) == pytest.approx(353.8944)
    assert eq.tensor_ms(**of, per_layer=4) == pytest.approx(353.8944 * 4 / 6)
    assert eq.tensor_ms(**{**of, "t": 1}) == 0


def test_equation_3() -> None:
    # 8 micro-batches, a send and a receive each, 4,096,000 bytes: 65,536,000 bytes. At 1 GB/s: 65.536 ms.
    assert eq.pipeline_ms(m=8, message_bytes=4_096_000, bytes_per_s=1e9) == pytest.approx(65.536)
    assert eq.pipeline_ms(m=8, message_bytes=4_096_000, bytes_per_s=1e9, p=1) == 0


def test_equation_4() -> None:
    # 2 bytes * 2.4e9 parameters / (4 * 2) = 0.6 GB a rank; in a ring of 3 2 * 2/3 of it: 0.8 GB. At 10 GB/s: 80 ms.
    assert eq.data_ms(parameters=2.4e9, p=4, t=2, d=3, bytes_per_s=10e9) == pytest.approx(80)
    assert eq.data_ms(parameters=2.4e9, p=4, t=2, d=1, bytes_per_s=10e9) == 0
    # Gradients in 32 bit: twice as long.
    assert eq.data_ms(parameters=2.4e9, p=4, t=2, d=3, bytes_per_s=10e9, bytes_per_value=4) == pytest.approx(160)


def test_equation_5() -> None:
    # A micro-batch takes 30 ms on each of 4 stages: the bubble is 3 of them, 90 ms.
    bubble = eq.bubble_ms(p=4, micro_batch_ms=30)
    assert bubble == 90
    # Two chunks halve it.
    assert eq.bubble_ms(p=4, micro_batch_ms=30, chunks=2) == 45


def test_equation_7() -> None:
    # 90 of 350 ms. Without the gradients' 20 ms: 90/330 = 3/11, which is (4-1)/(4-1+8).
    assert eq.bubble_ratio(bubble_ms=90, iteration_ms=350) == pytest.approx(0.2571429)
    assert eq.expected_bubble_ratio(p=4, m=8) == pytest.approx(3 / 11)
    assert eq.bubble_ratio(bubble_ms=90, iteration_ms=330) == pytest.approx(eq.expected_bubble_ratio(p=4, m=8))
    # Interleaved, two chunks: 1.5 micro-batches of 9.5.
    assert eq.expected_bubble_ratio(p=4, m=8, chunks=2) == pytest.approx(1.5 / 9.5)
    assert eq.expected_bubble_ratio(p=1, m=8) == 0


def test_equations_8_and_9() -> None:
    # 8 * 1e9 / (2 * 2) * 2 * 1000 = 4e12 FLOP; without recomputation 3e12.
    of = {"parameters": 1e9, "p": 2, "t": 2, "micro_batch": 2, "sequence": 1000}
    assert eq.micro_batch_flop(**of) == pytest.approx(4e12)
    assert eq.micro_batch_flop(**of, recompute=False) == pytest.approx(3e12)
    # 5 micro-batches: 2e13 FLOP; at 0.4 of 125 TFLOP/s = 5e13 FLOP/s: 0.4 s.
    found = eq.compute_ms(m=5, micro_batch_flop=4e12, utilisation=0.4, peak_flop_per_s=125e12)
    assert found == pytest.approx(400)


def test_equation_10() -> None:
    # l = 2, h = 10, V = 20, s = 5: 12 * 2 * 100 = 2400 weights, 13 * 2 * 10 = 260 biases and norms, and
    # (20 + 5) * 10 = 250 of the embeddings.
    assert eq.parameters(layers=2, hidden=10, vocabulary=20, sequence=5) == pytest.approx(2400 + 260 + 250)
    # The study's models of 1.5 and 3 billion parameters: 48 layers of 1600 and 54 of 2000. By hand:
    # 12 * 48 * 1600² = 1,474,560,000; 13 * 48 * 1600 = 998,400; (50257 + 1024) * 1600 = 82,049,600.
    small = eq.parameters(layers=48, hidden=1600, vocabulary=50257, sequence=1024)
    assert small == pytest.approx(1_474_560_000 + 998_400 + 82_049_600)
    # 12 * 54 * 2000² = 2,592,000,000; 13 * 54 * 2000 = 1,404,000; 51281 * 2000 = 102,562,000.
    large = eq.parameters(layers=54, hidden=2000, vocabulary=50257, sequence=1024)
    assert large == pytest.approx(2_592_000_000 + 1_404_000 + 102_562_000)


def test_equation_11() -> None:
    # b = 3, s = 6, l = 2, h = 10, V = 32: 96 * 3 * 6 * 2 * 100 = 345,600; times 1 + 6/60 + 32/320 = 1.2: 414,720.
    found = iteration_flop(batch=3, sequence=6, layers=2, hidden=10, vocabulary=32)
    assert found == pytest.approx(414_720)
    # By kinds of work, in the multiply-adds of a forward pass (Narayanan et al., appendix): a layer has 24bsh² + 4bs²h,
    # the logits have 6bshV over forward and backward. Four passes over the layers (forward, again, and two backward):
    # 2 * 4 * (24 * 3 * 6 * 100 + 4 * 3 * 36 * 10) + 6 * 3 * 6 * 10 * 32 = 380,160 + 34,560.
    assert found == pytest.approx(2 * 4 * (24 * 3 * 6 * 100 + 4 * 3 * 36 * 10) + 6 * 3 * 6 * 10 * 32)
