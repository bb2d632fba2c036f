from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.table import KernelSums, Kind, kernel_times, profiled_block
from overlap_callbacks.analysis.name_rules import is_communication
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import KernelTime, ProfiledBlock
from overlap_callbacks.instruments.profiler import Profile, read_events
from tests.columns import EPOCH_NS, MS, columns

TRAINING_THREAD, OTHER_THREAD = 41, 42


def event(name, activity, start, end, *, correlation=0, resource=0, is_async=False):
    """One of Kineto's events, as torch 2.10 and later give them."""
    return SimpleNamespace(
        name=lambda: name,
        activity_type=lambda: activity,
        start_ns=lambda: EPOCH_NS + start,
        duration_ns=lambda: end - start,
        correlation_id=lambda: correlation,
        device_resource_id=lambda: resource,
        is_async=lambda: is_async,
    )


def old_event(name, device, start, end, *, correlation=0, resource=0, is_async=False, is_user_annotation=False):
    """The same of an earlier torch, which does not tell the activity."""
    found = event(name, None, start, end, correlation=correlation, resource=resource, is_async=is_async)
    del found.activity_type
    found.device_type = lambda: getattr(torch._C._autograd.DeviceType, device)
    found.is_user_annotation = lambda: is_user_annotation
    return found


def op(name, start, end, thread=TRAINING_THREAD):
    return event(name, "cpu_op", start, end, resource=thread)


def gpu_kernel(name, start, end, correlation):
    return event(name, "kernel", start, end, correlation=correlation, resource=7)


def launch(time, correlation, activity="cuda_runtime"):
    return event("cudaLaunchKernel", activity, time, time + 5, correlation=correlation, resource=TRAINING_THREAD)


def read(events, bounds, thread=TRAINING_THREAD, quiet=()):
    """Rows of the timeline: (name, kind, step, start, end, count), times counted from the epoch of the tests."""
    steps = [(EPOCH_NS + start, EPOCH_NS + end) for start, end in bounds]
    found = read_events(events, steps, thread, [EPOCH_NS + time for time in quiet])
    starts, ends = found.intervals.start_ns - EPOCH_NS, found.intervals.end_ns - EPOCH_NS
    counts = np.zeros(len(found), dtype=int)
    counts[np.unique(found.call, return_index=True)[1]] = 1  # the first piece of each call
    parts = (found.kind, found.step, starts, ends, counts)
    rows = zip(found.name, *(part.tolist() for part in parts), strict=True)
    return sorted([(found.names[name], Kind(kind), *numbers) for name, kind, *numbers in rows], key=lambda row: row[3])


# -- names

COMMUNICATION = [
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)",
    "ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",  # RCCL keeps NCCL's names
    "rcclGenericKernel<1, false>",
    "void mscclpp::allreduce7<float>(float*, float*)",
    "mscclKernel_Sum_float_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)",
    "nvshmemi_proxy_rma_entrypoint_blocking(nvshmemi_proxy_rma_args)",
    "c10d::nvshmem_extension::allToAllV(void*, void*, long*, unsigned long, int)",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(float*)",
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*)",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>(float**)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(c10::BFloat16**)",
    "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)",
    "void deep_ep::internode_ll::combine<false, 7168>(void*)",
    "userbuffers_fp16_sum_inplace_gpu_rr_blocked<8>(int, int)",
    "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)",
    "gloo:all_reduce",
    "gloo:barrier",
    "ucc:alltoall",
    "mpi:all_reduce",
    "nccl:all_gather",
]

COMPUTE = [
    "hipblaslt_gemm",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1",
    "ampere_sgemm_128x64_nn",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
    "nvjet_tst_64x8_64x16_2x4_h_bz_TNT",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>, unsigned int> >",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<1> >",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<at::native::OpaqueType<4u>, 128>",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_64x3_tn_align8>",
    "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionE",
    "triton_poi_fused_add_mul_0",
    "triton_red_fused_native_layer_norm_3",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(cublasLt::cublasSplitKParams<float>)",
    "void cub::DeviceReduceByKeyKernel<cub::Policy, int*, int*>",
    "void at::native::_scatter_gather_elementwise_kernel<128, 4>",
    "aten::all",
    "ProfilerStep#3",
]


@pytest.mark.parametrize("name", COMMUNICATION)
def test_communication_is_known_by_its_name(name):
    assert is_communication(name)


@pytest.mark.parametrize("name", COMPUTE)
def test_compute_is_not_taken_for_communication(name):
    assert not is_communication(name)


# Seen in profiles: torch's own (its barrier and signals are asynchronous tensor parallelism's waiting), NVSHMEM's
# barrier, HybridEP (Megatron), MORI (Megatron on AMD), and the custom all-reduces of vLLM, SGLang, TensorRT-LLM and
# FlashInfer, which run inside reinforcement learning jobs.
@pytest.mark.parametrize(
    "name",
    [
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
        "c10d::symmetric_memory::put_signal_kernel(unsigned int**, int, int, int, int, unsigned long)",
        "c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)",
        "void c10d::intra_node_comm::oneShotAllReduceKernel<4u, true>(c10::BFloat16*, unsigned long)",
        "void c10d::intra_node_comm::twoShotAllReduceKernel<8u>(c10::BFloat16*, unsigned long)",
        "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)",
        "void hybrid_ep::device_sync_kernel<8>(unsigned int*)",
        "void hybrid_ep::dispatch_kernel<unsigned char>(hybrid_ep::dispatch_kernel_param_t<unsigned char>)",
        "void hybrid_ep::combine_kernel<8>(hybrid_ep::combine_kernel_param_t)",
        "EpDispatchIntraNodeKernel_bf16",
        "EpCombineIntraNodeKernel_bf16_nop2p",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
        "void sglang::cross_device_reduce_2stage<__half, 8>(sglang::RankData*, sglang::RankSignals)",
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, true, false>(AllReduceParams)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<__nv_bfloat16, 2>(void)",
    ],
)
def test_less_known_communication_is_known_too(name):
    assert is_communication(name)


def test_a_user_adds_a_pattern_for_what_is_not_known(monkeypatch):
    monkeypatch.setattr(name_rules, "communication_patterns", list(name_rules.communication_patterns))
    assert not is_communication("my_ring_kernel<4>")
    name_rules.communication_patterns.append(r"^my_ring")
    assert is_communication("my_ring_kernel<4>")
    assert not is_communication("their_my_ring")


# -- a device's events

BOUNDS = [(100, 200), (200, 300), (350, 400)]


def test_a_kernel_belongs_to_the_step_that_launched_it_not_to_the_one_in_which_it_ran():
    events = [
        gpu_kernel("gemm", 210, 260, correlation=1),
        gpu_kernel("softmax", 320, 330, correlation=2),
        gpu_kernel("norm", 420, 430, correlation=3),
        launch(399, 3),
        launch(150, 1),
        launch(299, 2, activity="cuda_driver"),  # Triton's
    ]
    assert read(events, BOUNDS) == [
        ("gemm", Kind.COMPUTE, 0, 210, 260, 1),
        ("softmax", Kind.COMPUTE, 1, 320, 330, 1),
        ("norm", Kind.COMPUTE, 2, 420, 430, 1),
    ]


def test_a_kernel_launched_before_the_first_step_between_two_or_after_the_last_is_in_none():
    events = [launch(time, number) for number, time in enumerate((90, 320, 400))]
    events += [gpu_kernel("late", 110 + number, 111 + number, correlation=number) for number in range(3)]
    assert [row[2] for row in read(events, BOUNDS)] == [-1, -1, -1]


def test_steps_are_closed_at_their_start_and_open_at_their_end():
    times = {100: 0, 199: 0, 200: 1, 299: 1, 300: -1, 349: -1, 350: 2, 399: 2, 400: -1, 99: -1}
    events = [launch(time, time) for time in times]
    events += [gpu_kernel("k", 500 + time, 501 + time, correlation=time) for time in times]
    assert {row[3] - 500: row[2] for row in read(events, BOUNDS)} == times


def test_a_kernel_whose_launch_lies_before_the_profile_belongs_to_no_step():
    events = [gpu_kernel("left over", 110, 160, correlation=9), launch(110, 1)]
    assert [row[2] for row in read(events, BOUNDS)] == [-1]


def test_without_any_recorded_launch_kernels_go_by_their_own_start():
    assert [row[2] for row in read([gpu_kernel("gemm", 210, 260, correlation=9)], BOUNDS)] == [1]


def test_kinds_of_device_activity():
    events = [
        gpu_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 110, 150, 1),
        gpu_kernel("gemm", 120, 130, 2),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 131, 134, correlation=3),
        event("Memset (Device)", "gpu_memset", 140, 141, correlation=4),
        *(launch(105, correlation) for correlation in (1, 2, 3, 4)),
    ]
    assert [(row[0][:8], row[1], row[2]) for row in read(events, BOUNDS)] == [
        ("ncclDevK", Kind.COMMUNICATION, 0),
        ("gemm", Kind.COMPUTE, 0),
        ("Memcpy D", Kind.COPY, 0),
        ("Memset (", Kind.COPY, 0),
    ]


def test_annotations_and_operators_are_no_kernels_where_there_is_a_device():
    events = [
        event("nccl:all_reduce", "gpu_user_annotation", 110, 190, correlation=1, resource=7),
        event("## forward ##", "user_annotation", 100, 190, correlation=2, resource=TRAINING_THREAD),
        event("gloo:all_reduce", "user_annotation", 100, 190, resource=OTHER_THREAD, is_async=True),
        op("aten::mm", 120, 130),
        launch(105, 1),
        gpu_kernel("gemm", 120, 130, 1),
    ]
    assert read(events, BOUNDS) == [("gemm", Kind.COMPUTE, 0, 120, 130, 1)]


def test_events_of_an_older_torch_are_told_apart_by_device_and_name():
    events = [
        old_event("cudaLaunchKernel", "CPU", 150, 155, correlation=1, resource=TRAINING_THREAD),
        old_event("hipExtLaunchKernel", "CPU", 160, 165, correlation=2, resource=TRAINING_THREAD),
        old_event("cuLaunchKernelEx", "CPU", 170, 175, correlation=3, resource=TRAINING_THREAD),
        old_event("cudaMemcpyAsync", "CPU", 180, 185, correlation=4, resource=TRAINING_THREAD),
        old_event("aten::mm", "CPU", 140, 190, correlation=9, resource=TRAINING_THREAD),
        old_event("nccl:all_reduce", "CUDA", 200, 290, correlation=5, is_user_annotation=True),
        old_event("gemm", "CUDA", 210, 220, correlation=1),
        old_event("ncclDevKernel_Generic", "CUDA", 221, 230, correlation=2),
        old_event("triton_poi_fused_0", "CUDA", 231, 240, correlation=3),
        old_event("Memcpy HtoD (Pinned -> Device)", "CUDA", 241, 250, correlation=4),
        old_event("Memset (Device)", "CUDA", 251, 252, correlation=4),
    ]
    assert [row[:3] for row in read(events, BOUNDS)] == [
        ("gemm", Kind.COMPUTE, 0),
        ("ncclDevKernel_Generic", Kind.COMMUNICATION, 0),
        ("triton_poi_fused_0", Kind.COMPUTE, 0),
        ("Memcpy HtoD (Pinned -> Device)", Kind.COPY, 0),
        ("Memset (Device)", Kind.COPY, 0),
    ]


def test_without_steps_nothing_is_in_a_step():
    assert [row[2] for row in read([gpu_kernel("gemm", 1, 2, 1), launch(0, 1)], [])] == [-1]
    assert [row[2] for row in read([op("aten::mm", 1, 2)], [])] == [-1]


def test_a_range_of_gloo_ends_at_the_latest_where_nothing_was_in_flight():
    events = [
        event("gloo:all_reduce", "cpu_op", 10, 20, is_async=True),  # before any quiet time
        event("gloo:all_reduce", "cpu_op", 20, 300, is_async=True),  # outlives two of them
        event("gloo:all_reduce", "cpu_op", 150, 300, is_async=True),  # outlives one
        event("gloo:all_reduce", "cpu_op", 250, 300, is_async=True),  # after the last
        op("aten::mm", 90, 190),  # compute is not cut
    ]
    rows = read(events, [(0, 100), (100, 200)], quiet=[100, 200])
    assert [(start, end) for _, _, _, start, end, _ in rows] == [(10, 20), (20, 100), (90, 190), (150, 200), (250, 300)]


def test_a_profile_without_events_is_an_empty_timeline():
    assert read([], BOUNDS) == []


# -- a host's events


def test_operators_count_by_self_time_and_once_each():
    events = [
        op("aten::linear", 100, 180),
        op("aten::t", 110, 120),
        op("aten::addmm", 130, 170),
        op("aten::relu", 180, 190),
    ]
    assert read(events, BOUNDS) == [
        ("aten::linear", Kind.COMPUTE, 0, 100, 110, 1),
        ("aten::t", Kind.COMPUTE, 0, 110, 120, 1),
        ("aten::linear", Kind.COMPUTE, 0, 120, 130, 0),
        ("aten::addmm", Kind.COMPUTE, 0, 130, 170, 1),
        ("aten::linear", Kind.COMPUTE, 0, 170, 180, 0),
        ("aten::relu", Kind.COMPUTE, 0, 180, 190, 1),
    ]


def test_an_operator_that_crosses_the_end_of_its_step_stays_whole():
    rows = read([op("aten::linear", 190, 230), op("aten::mm", 205, 215)], BOUNDS)
    assert [(row[0], row[2]) for row in rows] == [("aten::linear", 0), ("aten::mm", 1), ("aten::linear", 0)]


def test_other_threads_operators_are_left_out():
    events = [op("aten::mm", 100, 110), op("aten::copy_", 100, 190, thread=OTHER_THREAD)]
    assert read(events, BOUNDS) == [("aten::mm", Kind.COMPUTE, 0, 100, 110, 1)]


def test_waiting_and_issuing_are_no_compute_but_operators_within_them_are():
    events = [
        op("c10d::allreduce_", 100, 130),
        op("aten::empty", 105, 110),
        op("_c10d_functional::wait_tensor", 130, 140),
        op("aten::wait_tensor", 140, 145),
        op("aten::record_stream", 145, 150),
        op("aten::is_pinned", 150, 155),
        op("autograd::engine::evaluate_function: MmBackward0", 155, 185),
        op("aten::mm", 160, 170),
        event("Optimizer.step#SGD.step", "user_annotation", 186, 199, resource=TRAINING_THREAD),
        op("aten::add_", 188, 190),
    ]
    assert read(events, BOUNDS) == [
        ("aten::empty", Kind.COMPUTE, 0, 105, 110, 1),
        ("aten::mm", Kind.COMPUTE, 0, 160, 170, 1),
        ("aten::add_", Kind.COMPUTE, 0, 188, 190, 1),
    ]


def test_waiting_inside_an_operator_is_not_the_operator_s_time():
    rows = read([op("aten::mul", 100, 190), op("_c10d_functional::wait_tensor", 110, 180)], BOUNDS)
    assert [(row[3], row[4]) for row in rows] == [(100, 110), (180, 190)]


def test_gloo_ranges_are_communication_in_the_step_in_which_they_begin():
    def gloo(name, start, end):
        return event(name, "user_annotation", start, end, resource=OTHER_THREAD, is_async=True)

    events = [
        op("aten::mm", 100, 150),
        gloo("gloo:all_reduce", 120, 220),
        gloo("gloo:all_reduce", 230, 240),
        gloo("data_loading", 100, 200),
    ]
    assert read(events, BOUNDS) == [
        ("aten::mm", Kind.COMPUTE, 0, 100, 150, 1),
        ("gloo:all_reduce", Kind.COMMUNICATION, 0, 120, 220, 1),
        ("gloo:all_reduce", Kind.COMMUNICATION, 1, 230, 240, 1),
    ]


# -- figures of a block


TWO_STEPS = columns(
    [
        ("gemm", Kind.COMPUTE, 0, 0, 10),
        ("norm", Kind.COMPUTE, 0, 5, 15),  # on a second stream
        ("nccl", Kind.COMMUNICATION, 0, 8, 12),
        ("nccl", Kind.COMMUNICATION, 0, 9, 11),  # on a second communicator
        ("nccl", Kind.COMMUNICATION, 0, 14, 22),  # runs on beside the next step's compute
        ("copy", Kind.COPY, 0, 30, 33),
        ("copy", Kind.COPY, -1, 34, 40),
        ("mark", Kind.OTHER, 0, 0, 50),
        ("gemm", Kind.COMPUTE, 1, 16, 26),
        ("gemm", Kind.COMPUTE, -1, 40, 45),
    ]
)


def test_figures_of_a_block_of_one_step_by_hand():
    assert profiled_block(Mode.OVERLAPPED, 3, KernelSums(TWO_STEPS), [0]) == ProfiledBlock(
        arm=Mode.OVERLAPPED,
        block=3,
        num_steps=1,
        compute_ms=10 + 10,
        compute_busy_ms=15,
        comm_ms=4 + 2 + 8,
        comm_busy_ms=4 + 8,
        hidden_comm_ms=4 + (1 + 6),  # 8-12 whole; of 14-22: 14-15, and 16-22 in the step after
        covered_compute_ms=2 + (4 + 1),  # of 0-10: 8-10; of 5-15: 8-12 and 14-15
        copy_ms=3,
    )


def test_a_step_s_compute_is_covered_by_communication_of_the_step_before():
    found = profiled_block(Mode.SEQUENTIAL, 0, KernelSums(TWO_STEPS), [1])
    assert (found.compute_ms, found.covered_compute_ms) == (10, 6)
    assert (found.comm_ms, found.comm_busy_ms, found.hidden_comm_ms, found.copy_ms) == (0, 0, 0, 0)


def test_figures_of_a_block_of_two_steps_are_means_per_step():
    found = profiled_block(Mode.SEQUENTIAL, 0, KernelSums(TWO_STEPS), [0, 1])
    assert found.compute_ms == (20 + 10) / 2
    assert found.compute_busy_ms == (15 + 10) / 2
    assert found.comm_ms == 14 / 2
    assert found.comm_busy_ms == 12 / 2
    assert found.hidden_comm_ms == 11 / 2
    assert found.covered_compute_ms == (7 + 6) / 2
    assert found.copy_ms == 3 / 2


def test_intervals_of_one_kind_are_those_of_all_steps():
    assert TWO_STEPS.of(Kind.COMPUTE).durations_ns.tolist() == [10 * MS, 10 * MS, 10 * MS, 5 * MS]
    assert TWO_STEPS.of(Kind.COPY).sum_ns == 9 * MS


# -- figures of each kernel

FOUR_STEPS = columns(
    [
        ("gemm", Kind.COMPUTE, 0, 0, 6),
        ("gemm", Kind.COMPUTE, 0, 7, 13),
        ("gemm", Kind.COMPUTE, 3, 90, 98),
        ("gemm", Kind.COMPUTE, 1, 20, 25),
        ("gemm", Kind.COMPUTE, 1, 26, 31),
        ("nccl", Kind.COMMUNICATION, 0, 1, 4),
        ("nccl", Kind.COMMUNICATION, 1, 40, 42),
        ("linear", Kind.COMPUTE, 2, 60, 61, 1),  # one call in two pieces
        ("linear", Kind.COMPUTE, 2, 63, 64, 0),
        ("copy", Kind.COPY, 0, 70, 89),
        ("gemm", Kind.COMPUTE, -1, 100, 200),
    ]
)
OVERLAPPED_STEPS, SEQUENTIAL_STEPS = np.array([0, 3]), np.array([1, 2])


def test_time_and_calls_of_each_kernel_by_hand():
    found = kernel_times(FOUR_STEPS, OVERLAPPED_STEPS, SEQUENTIAL_STEPS, most=10)
    assert found == (
        KernelTime("gemm", False, overlapped_calls=3 / 2, sequential_calls=1, overlapped_ms=10, sequential_ms=5),
        KernelTime("nccl", True, overlapped_calls=1 / 2, sequential_calls=1 / 2, overlapped_ms=1.5, sequential_ms=1),
        KernelTime("linear", False, overlapped_calls=0, sequential_calls=1 / 2, overlapped_ms=0, sequential_ms=1),
    )
    gemm, nccl, linear = found
    assert gemm.lost_ms == 5
    assert gemm.slowdown == pytest.approx((10 / 1.5) / 5 - 1)  # per call, not per step
    assert nccl.slowdown == pytest.approx(0.5)
    assert linear.slowdown is None  # ran in one mode only


def test_the_kernels_with_the_most_time_are_kept():
    found = kernel_times(FOUR_STEPS, OVERLAPPED_STEPS, SEQUENTIAL_STEPS, most=2)
    assert [kernel.name for kernel in found] == ["gemm", "nccl"]


def test_without_steps_of_one_mode_its_time_is_zero_and_there_is_no_slowdown():
    gemm = kernel_times(FOUR_STEPS, OVERLAPPED_STEPS, np.array([], dtype=np.int64), most=1)[0]
    assert (gemm.sequential_calls, gemm.sequential_ms) == (0, 0)
    assert gemm.slowdown is None


# -- the real profiler


def test_the_real_profiler_finds_operators_in_the_step_that_ran_them():
    a = torch.ones(16, 16)
    profile = Profile(on_cuda=False)
    profile.start()
    profile.begin_step()
    a @ a
    profile.end_step()
    torch.sigmoid(a)  # between the steps
    profile.begin_step()
    torch.cos(a)
    elsewhere = threading.Thread(target=torch.sin, args=(a,))
    elsewhere.start()
    elsewhere.join()
    profile.end_step()
    profile.stop()
    found = profile.kernels()

    step_of = {found.names[name]: step for name, step in zip(found.name, found.step.tolist(), strict=True)}
    assert step_of["aten::mm"] == 0
    assert step_of["aten::sigmoid"] == -1
    assert step_of["aten::cos"] == 1
    assert "aten::sin" not in step_of
    assert set(found.kind.tolist()) == {Kind.COMPUTE}
    calls = {found.names[name]: found.call[found.name == name] for name in found.name}
    assert [len(np.unique(calls[name])) for name in ("aten::mm", "aten::cos")] == [1, 1]


def test_the_profiler_s_clock_agrees_with_the_host_s():
    # Steps are found again by ``time.time_ns``: were the clocks apart, kernels would land in the wrong step.
    profile = Profile(on_cuda=False)
    profile.start()
    bounds = []
    for name in ("first", "second"):
        profile.begin_step()
        before = time.time_ns()
        with torch.profiler.record_function(name):
            time.sleep(0.002)
        bounds.append((before, time.time_ns()))
        profile.end_step()
    profile.stop()
    events = {event.name(): event for event in profile._profile.profiler.kineto_results.events()}
    # Kineto converts its clock by a measured rate; a tenth of the marker's length is ample for that.
    slack_ns = 200_000
    for name, (before, after) in zip(("first", "second"), bounds, strict=True):
        assert before - slack_ns <= events[name].start_ns() <= events[name].end_ns() <= after + slack_ns
        assert events[name].duration_ns() >= 2_000_000 - slack_ns
    for (low, high), (before, after) in zip(profile._bounds, bounds, strict=True):
        assert low <= before <= after <= high


def test_only_one_profiler_runs_at_a_time_and_that_can_be_asked():
    assert Profile.available()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not Profile.available()
    profile = Profile(on_cuda=False)
    profile.start()
    assert not Profile.available()
    profile.stop()
    assert Profile.available()


def test_a_profiler_of_the_user_s_that_starts_during_ours_keeps_its_session():
    enable = torch.autograd.profiler._enable_profiler
    ours = Profile(on_cuda=False)
    ours.start()
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    theirs.start()
    assert ours.stop() is False
    assert not Profile.available()  # theirs runs on
    torch.cos(torch.ones(4))
    theirs.stop()
    assert "aten::cos" in {event.name for event in theirs.events()}
    assert torch.autograd.profiler._enable_profiler is enable  # torch is as it was


def test_stopping_twice_or_without_a_start_is_harmless():
    Profile(on_cuda=False).stop()
    profile = Profile(on_cuda=False)
    profile.start()
    assert profile.stop() is True
    assert profile.stop() is True
    assert len(profile.kernels().intervals) == 0
