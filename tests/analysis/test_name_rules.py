from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.name_rules import (
    OTHER,
    Rule,
    collective_in_words,
    collective_of,
    family_of,
    is_communication,
    is_communication_range,
)
from overlap_callbacks.analysis.safe_text import clean

FAMILIES = {
    "gemm": [
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass_80_tensorop_s1688gemm_256x",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_64x3_tn_align8>",
        "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_32x4_nhwc_align4>",
        "void cutlass_cudnn_train::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_256x128_16x3_nhwc_align4>",
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGemmMult",
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_execute_ke",
        "sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_execute_kernel_cud",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
        "void cudnn::cnn::reduce_wgrad_nchw_helper<float, float>(void*, void const*, float, int, int)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, true, false>(cublasLt::P<f",
        "ampere_sgemm_32x32_sliced1x4_tn",
        "volta_sgemm_128x32_nt",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float, false, tr",
        "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParams<cublasGemvTensorStridedBatc",
        "void epilogue::impl::globalKernel<float, float, float, true, true>(int, int, long, float*, cublasLtEpilogue_",
        "Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16_MI16x16x1_SN_LDSB0_AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0_EPS0",
        "nvjet_tst_64x8_64x16_2x4_h_bz_TNT",
        "hipblaslt_gemm",
        "triton_tem_fused_mm_3",
        "aten::addmm",
        "aten::mm",
        "aten::linear",
        "aten::matmul",
        "aten::convolution_backward",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Para",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_31_64x128x64_4x1x1_kernel0_0",
        "aten::_scaled_dot_product_flash_attention_backward",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorL",
        "split_embedding_backward_codegen_rowwise_adagrad_weighted_find_long_segments(at::GenericPackedTensorAccessor",
        "aten::_foreach_addcdiv_",
        "aten::_fused_adamw_",
    ],
    "normalisation": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
        "void at::native::(anonymous namespace)::LayerNormForwardCUDAKernel<float, float>(long, float const*, float c",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float, float>(float const*, float const",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long, long, float const*)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>(long, float, float const*, fl",
        "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(cudnn::bn_fw_tr_1C11_args<float>)",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 32, true, 1>(float, float, float, float, cudnnTensor",
        "triton_red_fused_native_layer_norm_3",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<rms_norm>",
        "aten::native_layer_norm_backward",
        "aten::_fused_rms_norm",
    ],
    "copy": [
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<at::native::OpaqueType<4u>, uns",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(nchw2nhwc_para",
        "void cudnn::ops::nhwcToNchwKernel<float, float, float, true, false, (cudnnKernelDataType_t)0>(nhwc2nchw_para",
        "aten::copy_",
        "aten::cat",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, ",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::WelfordOps<float, float, int,",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, float const*,",
        "void cub::DeviceReduceByKeyKernel<cub::DispatchReduceByKey<long*, long*, cub::ConstantInputIterator<int, int",
        "void cub::DeviceScanKernel<cub::AgentScanPolicy<128, 15, int, (cub::BlockLoadAlgorithm)3>>",
        "triton_per_fused_sum_5",
        "aten::_log_softmax",
        "aten::sum",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char",
        "void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda(at::TensorIteratorBase&)::",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::addcmul_cuda_kernel>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, at::detail::Array<char*, 1",
        "triton_poi_fused_add_mul_0",
        "aten::mul_",
        "aten::gelu_backward",
        "aten::threshold_backward",
    ],
    OTHER: [
        "void fbgemm_gpu::permute_2D_data_kernel<false, int, int, decltype(nullptr)>(int, int, int, int const*)",
        "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(float const*, float const*,",
        "void fbgemm_gpu::_offsets_range_cuda_kernel<int>(long, long, int const*, int*)",
        "void split_embedding_codegen_forward_weighted_kernel<c10::Half, c10::Half, float, false, long, 2ul, 32ul>(at",
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800, false, long, ",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<long, long, unsigned int, 1, 1, -2, true>",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*, long, long, l",
        "void cask_cudnn_infer::computeOffsetsKernel<false, false>(cask_cudnn_infer::ComputeOffsetsParams)",
        "aten::embedding",
        "aten::to",
        "",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "family"), [(name, family) for family, found in FAMILIES.items() for name in found])
def test_a_real_kernel_belongs_to_its_family(name: str, family: str) -> None:
    assert family_of(name) == family
    assert not is_communication(name)


@pytest.mark.parametrize(
    ("name", "not_of"),
    [
        ("aten::expand", "elementwise"), ("aten::normal_", "reduction"), ("aten::maximum", "reduction"),
        ("aten::minimum", "reduction"), ("void convert_fp16_to_fp32<float>", "gemm"),
    ],
)  # fmt: skip
def test_a_name_that_only_begins_like_another_is_not_of_its_family(name: str, not_of: str) -> None:
    assert family_of(name) != not_of


COLLECTIVES = {
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)": "all_reduce",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>": "all_reduce",
    "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)": "all_to_all",
    "userbuffers_fp16_sum_inplace_gpu_rr_blocked<8>(int, int)": "all_reduce",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": OTHER,
    "rcclGenericKernel<1, false>": OTHER,
    "nccl:all_reduce": "all_reduce",
    "nccl:_all_gather_base": "all_gather",
    "nccl:_reduce_scatter_base": "reduce_scatter",
    "nccl:all_to_all": "all_to_all",
    "nccl:send 0->1": "send_recv",
    "nccl:recv 1<-0": "send_recv",
    "nccl:coalesced": OTHER,
    "gloo:all_reduce": "all_reduce",
    "gloo:barrier": "barrier",
    "gloo:scatter": "scatter",
    "gloo:gather": "gather",
}

# In the metadata of a kernel, where its name does not say that it communicates.
METADATA = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "alltoallv": "all_to_all", "all_to_allv": "all_to_all",
    "alltoall_base": "all_to_all", "broadcast": "broadcast", "_broadcast_oop": "broadcast", "reduce": "reduce",
    "send": "send_recv", "recv": "send_recv", "barrier": "barrier", "gather": "gather", "scatter": "scatter",
    "wait": OTHER,
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_collective_of_real_communication_kernels_and_ranges(name: str) -> None:
    assert is_communication(name)
    assert collective_of(name) == COLLECTIVES[name]


@pytest.mark.parametrize("name", METADATA)
def test_names_of_collectives_in_metadata_are_known(name: str) -> None:
    assert collective_of(name) == METADATA[name]


def test_the_first_rule_that_matches_decides_and_rules_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert family_of("gemm_a") == "gemm"  # what was said before is not remembered beyond the rules
    monkeypatch.setattr(name_rules, "families", [Rule("mine", "mine"), Rule("first", "gemm_a"), *name_rules.families])
    monkeypatch.setattr(name_rules, "communication_patterns", [*name_rules.communication_patterns, r"^my_reduce"])
    assert [family_of(name) for name in ("gemm_a", "gemm_b", "mine_gemm_a")] == ["first", "gemm", "mine"]
    assert is_communication("my_reduce_kernel")
    assert not is_communication("not_my_reduce_kernel")


# -- names made fit for tables


@given(st.one_of(st.text(max_size=40), st.text(min_size=990, max_size=1_100), st.text().map(lambda text: text * 200)))
def test_a_clean_name_is_printable_bounded_and_clean_already(name: str) -> None:
    found = clean(name)
    assert found.isprintable()
    assert len(found) <= 1_000
    assert clean(found) == found
    if len(name) <= 1_000:
        assert len(found) == len(name)
        assert all(a == b or (b == "\ufffd" and not a.isprintable()) for a, b in zip(name, found, strict=True))


def test_a_name_that_is_fit_stays_as_it_is() -> None:
    for name in ("aten::mm", "void f<int>(char*)", "x" * 1_000, "<b>[red]é漢字</b>"):
        assert clean(name) == name


def test_long_names_that_differ_anywhere_stay_different() -> None:
    long = ["x" * 5_000 + end for end in ("a", "b", "")] + ["y" + "x" * 4_999]
    assert len({clean(name) for name in long}) == len(long)
    assert all(clean(name).startswith(name[:900]) for name in long)


def test_control_characters_and_lone_surrogates_are_replaced() -> None:
    assert clean("a\x00b\x1b[31m\n\t\u202ec\ud800") == "a\ufffdb\ufffd[31m\ufffd\ufffd\ufffdc\ufffd"
    assert clean("\ud800" * 2_000).isprintable()


# -- communication

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
        "void c10d::nccl_extension::reduce_scatter_offset_kernel<float>(ncclWindow_vidmem*, unsigned long)",
        "c10d::nccl_extension::all_gather_offset_push_kernel(ncclWindow_vidmem*, unsigned long)",
        "c10d::nccl_extension::lsa_put_signal_kernel(ncclWindow_vidmem*, unsigned long)",
        "void ubx_kernel_allreduce<__nv_bfloat16>(ubx_args)",
        "all_to_all_lsa_kernel(ncclWindow_vidmem*, unsigned long)",
        "lsa_simple_alltoall_kernel(ncclDevComm)",
        "oneshot_mc_allreduce_kernel(float*, unsigned long)",
        "reshardKernelUserWindow(ncclWindow_vidmem*)",
        "_ZN4c10d14nccl_extension24reduce_scatter_col_kernelIfEEvP16ncclWindow_vidmem",
        "void ubx_kernel_allreduce_2shot_mc<8>(int, int, int, int*, int*, uint4*)",
        "_Z40ubx_kernel_a2av_token_bf16_mxfp8_persisti",
        "void unidir_lsa_kernel<float>(ncclDevComm, ncclWindow_vidmem*, unsigned long, int)",
        "void a2a_lsa_comm_kernel<opus_gemm_traits<512, 256> >(opus_a2a_gemm_kargs)",
        "twoshot_mc_simple_allreduce_kernel(float*, unsigned long)",
        "twoshot_mc_poison_allreduce_kernel(float*, unsigned long)",
        "void one_shot_reduce_scatter_kernel<float>(float**)",
        "void PureGinAlltoAllKernel<float>(float*, unsigned long)",
        "my_fused_kernel(ncclDevComm, float*)",
    ],
)
def test_less_known_communication_is_known_too(name):
    assert is_communication(name)


# Names in public traces and sources: DeepSeek's traces of DeepEP, DeepEP 2, TensorRT-LLM and FlashInfer, pplx, MORI
# (demangled, mangled, and as it compiles at run time), quickreduce in vLLM, SGLang and aiter; and peer copies.
@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("void dpsk::ep::internode::dispatch<false, 4, false, 4>(int4*, float*, long*, float*)", "all_to_all"),
        ("void dpsk::ep::internode::combine<4, __nv_bfloat16, 8>(int4*, float*)", "all_to_all"),
        ("void dpsk::ep::internode::notify_dispatch<false, 4>(int const*, long*, int, int const*)", "all_to_all"),
        ("void dpsk::ep::internode::cached_notify<false>(int, int, int)", "all_to_all"),
        ("void deep_ep::intranode::cached_notify_combine<8>(void**, int*, int, int, int, int**)", "all_to_all"),
        ("void deep_ep::internode_ll::clean_low_latency_buffer<1024>(int*, int, int*, int)", "all_to_all"),
        ("void deep_ep::elastic::dispatch_impl<8, 1, 2048>(int*)", "all_to_all"),
        ("void tensorrt_llm::kernels::mnnvl_throughput::moeA2ADispatchKernel<8, false>(int const*)", "all_to_all"),
        ("void flashinfer::trtllm_alltoall::moeAllToAllKernel<true>(int)", "all_to_all"),
        ("void moeA2ACombineKernel<__nv_bfloat16, 8>(int)", "all_to_all"),
        ("void rose::a2a_dispatch_send_kernel<true, 16, 8, rose::NotFixed>(unsigned long)", "all_to_all"),
        ("void a2a_combine_recv_kernel<16, 8>(unsigned long)", "all_to_all"),
        ("void mori::moe::EpDispatchInterNodeV1Kernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs)", "all_to_all"),
        ("_ZN4mori3moe26EpDispatchInterNodeKernelI12hip_bfloat16EEvNS0_21EpDispatchCombineArgsIT_EE", "all_to_all"),
        ("EpCombineSyncBarrier_bf16", "all_to_all"),
        ("quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half, 4>>>", "all_reduce"),
        ("void aiter::allreduce_fusion_kernel_1stage<__hip_bfloat16, 8>(aiter::RankData*)", "all_reduce"),
        ("_ZN5aiter33reduce_scatter_cross_device_storeIDF16bLi8EEEvPNS_8RankDataE", "reduce_scatter"),
        ("void aiter::allgather_lastdim<__hip_bfloat16, 8>(aiter::RankData*)", "all_gather"),
        ("Memcpy PtoP (Device -> Device)", "peer_copy"),
    ],
)
def test_communication_of_other_libraries_and_of_copy_engines_is_known(name: str, collective: str) -> None:
    assert is_communication(name)
    assert collective_of(name) == collective


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, int*, bool*, int)",
        "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, int*, bool*, int, int, int)",
        "void cdpsk::ep::CUB_200200_900_NS::DeviceScanKernel<int>(int)",
        "void deep_ep::elastic::combine_reduce_epilogue_impl<false, 4>(__nv_bfloat16*, float*)",
        "void deep_ep::elastic::dispatch_deterministic_prologue_impl<4, 8>(long*)",
        "void moeA2APrepareCombineKernel<BlockPolicy>(unsigned char*, unsigned char const*, int, int)",
        "void moeA2ASanitizeExpertIdsKernel(int*, int const*, int)",
        "EpDispatchCopyToStaging_bf16",
        "EpCombineSync_bf16",
        "EpCombineAll_bf16",
        "_ZN4mori3moe13EpCombineSyncIfEEvNS0_21EpDispatchCombineArgsIT_EE",
        "void aiter::local_device_load_rmsnorm_512n<__hip_bfloat16>(aiter::RankSignals)",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "triton_poi_fused_all_reduce_0",
        "triton_poi_fused__to_copy_one_shot_all_reduce_1",
        "triton_red_fused_multimem_all_reduce_native_layer_norm_2",
        "triton_per_fused_reduce_scatter_tensor_sum_wait_tensor_3",
        "void qubx_kernel_step(float*)",
        "my_dlsa_kernel(float*)",
        "void screenshot_allocator(float*)",
    ],
)
def test_local_work_around_communication_is_not_communication(name: str) -> None:
    assert not is_communication(name)


def test_a_user_adds_a_pattern_for_what_is_not_known(monkeypatch):
    monkeypatch.setattr(name_rules, "communication_patterns", list(name_rules.communication_patterns))
    assert not is_communication("my_ring_kernel<4>")
    name_rules.communication_patterns.append(r"^my_ring")
    assert is_communication("my_ring_kernel<4>")
    assert not is_communication("their_my_ring")


def test_pointwise_compute_is_elementwise_whatever_collective_its_name_has() -> None:
    for collective in (
        "all_reduce",
        "all_gather_into_tensor_wait_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
    ):
        assert family_of(f"triton_poi_fused_{collective}_0") == "elementwise"


@pytest.mark.parametrize(
    "name", ["one_shot_all_reduce of layer 3", "mscclpp_setup", "gloo: warm-up", "userbuffers_init"]
)
def test_a_host_range_that_only_sounds_like_communication_does_not_count(name: str) -> None:
    assert not is_communication_range(name)
    assert is_communication_range("gloo:all_reduce")


def test_a_pattern_of_the_user_is_for_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_rules, "communication_patterns", [*name_rules.communication_patterns, "^my_sync"])
    assert is_communication_range("my_sync of layer 3")


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("_allgather_base_", "all_gather"),
        ("allgather_into_tensor_coalesced_", "all_gather"),
        ("nccl:_all_gather_base", "all_gather (nccl)"),
        ("gloo:all_reduce", "all_reduce (gloo)"),
        ("allreduce_coalesced_", "all_reduce"),
        ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
        ("alltoall_base_", "all_to_all"),
        ("send", "send"),
        ("recv_any_source_", "recv"),
        ("unheard_of_", "unheard_of"),
    ],
)
def test_a_collective_has_one_name_on_all_screens(operator: str, words: str) -> None:
    assert collective_in_words(operator) == words
