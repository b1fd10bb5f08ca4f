use super::super::{
    AttentionGeometry, Dtype, Granularity, HeadShard, IndexGeometry, IndexScales, MlaGeometry,
    Role, ScalePer, Scales, TensorKey,
};
use super::*;

mod groups;
mod properties;
mod state;

/// Two layers of 4 heads, 8 elements of 2 bytes: a token of a layer's keys takes 64 bytes.
fn small() -> ModelGeometry {
    ModelGeometry::llama_like(2, 4, 8, Dtype::Bf16).unwrap()
}

fn one(builder: &LayoutBuilder) -> RankLayout {
    builder.build_replica(Grid::new(1, 1, 1).unwrap(), 0).unwrap().remove(0)
}

fn key(layer: u32, role: Role) -> TensorKey {
    TensorKey { layer, role }
}

/// Region, base, and the strides of block, token, head and dim.
fn strides(layout: &RankLayout, layer: u32, role: Role) -> (u32, u64, [u64; 4]) {
    let tensor = layout.tensor(key(layer, role)).unwrap();
    let axes = [tensor.block, tensor.token, tensor.head, tensor.dim];
    (tensor.region, tensor.base, axes.map(|axis| axis.stride))
}

fn builder(named: NamedLayout) -> LayoutBuilder {
    LayoutBuilder::new(&small(), named).blocks(10).block_tokens(16)
}

#[test]
fn flash_attention_has_keys_and_values_apart() {
    let nhd = one(&builder(NamedLayout::FlashAttentionNhd));
    assert_eq!(strides(&nhd, 0, Role::Key), (0, 0, [1024, 64, 16, 2]));
    assert_eq!(strides(&nhd, 0, Role::Value), (1, 0, [1024, 64, 16, 2]));
    assert_eq!(strides(&nhd, 1, Role::Value), (3, 0, [1024, 64, 16, 2]));
    assert_eq!(nhd.regions().iter().map(|region| region.bytes).collect::<Vec<_>>(), [10_240; 4]);

    let hnd = one(&builder(NamedLayout::FlashAttentionHnd).regions(RegionPolicy::Single));
    assert_eq!(strides(&hnd, 0, Role::Key), (0, 0, [1024, 16, 256, 2]));
    assert_eq!(strides(&hnd, 0, Role::Value), (0, 10_240, [1024, 16, 256, 2]));
    assert_eq!(strides(&hnd, 1, Role::Key), (0, 20_480, [1024, 16, 256, 2]));
    assert_eq!(hnd.regions()[0].bytes, 40_960);
}

#[test]
fn flash_infer_has_keys_and_values_in_one_block() {
    let nhd = one(&builder(NamedLayout::FlashInferNhd));
    assert_eq!(strides(&nhd, 0, Role::Key), (0, 0, [2048, 64, 16, 2]));
    assert_eq!(strides(&nhd, 0, Role::Value), (0, 1024, [2048, 64, 16, 2]));
    let hnd = one(&builder(NamedLayout::FlashInferHnd));
    assert_eq!(strides(&hnd, 1, Role::Key), (1, 0, [2048, 16, 256, 2]));
    assert_eq!(strides(&hnd, 1, Role::Value), (1, 1024, [2048, 16, 256, 2]));
}

#[test]
fn cross_layer_has_all_layers_of_a_block_together() {
    let nhd = one(&builder(NamedLayout::CrossLayerNhd));
    assert_eq!(strides(&nhd, 0, Role::Value), (0, 1024, [4096, 64, 16, 2]));
    assert_eq!(strides(&nhd, 1, Role::Key), (0, 2048, [4096, 64, 16, 2]));
    assert_eq!(nhd.regions().len(), 1);
    // A head's rows in a block: layer 0 K, V, layer 1 K, V, of 256 bytes each.
    let hnd = one(&builder(NamedLayout::CrossLayerHnd));
    assert_eq!(strides(&hnd, 0, Role::Value), (0, 256, [4096, 16, 1024, 2]));
    assert_eq!(strides(&hnd, 1, Role::Key), (0, 512, [4096, 16, 1024, 2]));
    let nhd = one(&builder(NamedLayout::CrossLayerPackedNhd));
    assert_eq!(strides(&nhd, 1, Role::Key), (0, 2048, [4096, 128, 32, 2]));
    assert_eq!(strides(&nhd, 1, Role::Value), (0, 2064, [4096, 128, 32, 2]));
    let hnd = one(&builder(NamedLayout::CrossLayerPackedHnd));
    assert_eq!(strides(&hnd, 1, Role::Key), (0, 512, [4096, 32, 1024, 2]));
    assert_eq!(strides(&hnd, 1, Role::Value), (0, 528, [4096, 32, 1024, 2]));
    let refusal = builder(NamedLayout::CrossLayerNhd).regions(RegionPolicy::PerLayer);
    assert!(refusal.build(*nhd.coords()).unwrap_err().to_string().contains("cross-layer"));
}

#[test]
fn heads_outside_must_be_as_many_in_every_layer() {
    let layers =
        [4, 2].map(|heads| LayerKind::Attention(AttentionGeometry::new(heads, 8, Dtype::Bf16)));
    let model = ModelGeometry::new("uneven", layers.into()).unwrap();
    let coords = Grid::new(1, 1, 1).unwrap().ranks().next().unwrap();
    for named in NamedLayout::ALL {
        let outside = named.is_cross_layer_with_heads_outside();
        match LayoutBuilder::new(&model, named).build(coords) {
            Ok(_) => assert!(!outside, "{named}"),
            Err(error) => {
                assert!(
                    outside && error.to_string().contains("2 heads in layer 1, 4 in"),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn a_latent_is_held_by_every_rank() {
    let model = ModelGeometry::preset("deepseek-v3").unwrap();
    let builder = LayoutBuilder::new(&model, NamedLayout::FlashAttentionNhd).block_tokens(64);
    let ranks = builder.build_replica(Grid::new(8, 1, 1).unwrap(), 0).unwrap();
    for rank in &ranks {
        assert_eq!(rank.tensors().len(), 61);
        let latent = rank.tensor(key(60, Role::Latent)).unwrap();
        assert_eq!(latent.heads, HeadShard { first: 0, total: 1 });
        assert_eq!((latent.dim, latent.token), (Axis::new(576, 2), Axis::new(64, 1152)));
        assert_eq!(latent.block, Axis::new(1024, 73_728));
    }
}

#[test]
fn packed_rows_hold_a_key_and_its_value() {
    // A row is 16 + 16 bytes.
    let nhd = one(&builder(NamedLayout::PackedNhd));
    assert_eq!(strides(&nhd, 1, Role::Key), (1, 0, [2048, 128, 32, 2]));
    assert_eq!(strides(&nhd, 1, Role::Value), (1, 16, [2048, 128, 32, 2]));
    let hnd = one(&builder(NamedLayout::PackedHnd));
    assert_eq!(strides(&hnd, 0, Role::Key), (0, 0, [2048, 32, 512, 2]));
    assert_eq!(strides(&hnd, 0, Role::Value), (0, 16, [2048, 32, 512, 2]));
    assert_eq!(hnd.regions()[0].bytes, 20_480);
}

#[test]
fn pallas_pads_rows() {
    // Rows of 128 elements of 2 bytes; key and value of each of 4 heads take turns.
    let wide = one(&builder(NamedLayout::Pallas));
    assert_eq!(strides(&wide, 0, Role::Key), (0, 0, [32_768, 2048, 512, 2]));
    assert_eq!(strides(&wide, 0, Role::Value), (0, 256, [32_768, 2048, 512, 2]));
    // 3 heads of one byte: 6 rows are padded to 8.
    let model = ModelGeometry::llama_like(1, 3, 130, Dtype::Fp8E4m3).unwrap();
    let odd = LayoutBuilder::new(&model, NamedLayout::Pallas).blocks(10);
    let odd = one(&odd);
    assert_eq!(strides(&odd, 0, Role::Key), (0, 0, [16 * 8 * 256, 8 * 256, 512, 1]));
    // Heads of 64 elements: a key and its value share a row; 3 rows of 2 bytes are padded to 4.
    let model = ModelGeometry::llama_like(1, 3, 64, Dtype::Bf16).unwrap();
    let half = one(&LayoutBuilder::new(&model, NamedLayout::Pallas).blocks(10));
    assert_eq!(strides(&half, 0, Role::Key), (0, 0, [16 * 1024, 1024, 256, 2]));
    assert_eq!(strides(&half, 0, Role::Value), (0, 128, [16 * 1024, 1024, 256, 2]));
}

/// As measured on vLLM 0.32: blocks of 32,768 elements, 2 heads of 128 tokens and 64 elements; keys are transposed.
#[test]
fn on_a_cpu_keys_are_transposed() {
    let model = ModelGeometry::llama_like(1, 2, 64, Dtype::Bf16).unwrap();
    let layout = LayoutBuilder::new(&model, NamedLayout::CpuTransposed).block_tokens(128).blocks(4);
    let layout = one(&layout);
    let (block, head, keys) = (65_536, 32_768, 128 * 64 * 2);
    assert_eq!(strides(&layout, 0, Role::Key), (0, 0, [block, 2, head, 256]));
    assert_eq!(strides(&layout, 0, Role::Value), (0, keys, [block, 128, head, 2]));
}

#[test]
fn keys_and_values_may_differ_in_width() {
    let attention = AttentionGeometry { value_dim: 4, ..AttentionGeometry::new(2, 8, Dtype::Bf16) };
    let model = ModelGeometry::new("m", vec![LayerKind::Attention(attention)]).unwrap();
    let built = |named| one(&LayoutBuilder::new(&model, named).block_tokens(2).blocks(3));
    let flash = built(NamedLayout::FlashInferNhd);
    assert_eq!(strides(&flash, 0, Role::Key), (0, 0, [96, 32, 16, 2]));
    assert_eq!(strides(&flash, 0, Role::Value), (0, 64, [96, 16, 8, 2]));
    let cross = built(NamedLayout::CrossLayerHnd);
    assert_eq!(strides(&cross, 0, Role::Key), (0, 0, [96, 16, 48, 2]));
    assert_eq!(strides(&cross, 0, Role::Value), (0, 32, [96, 8, 48, 2]));
}

/// A latent's index is a tensor of another width, first all keys of a block and then their scales.
#[test]
fn an_index_lies_beside_its_latent() {
    let index = IndexGeometry {
        dim: 6,
        dtype: Dtype::Fp8E4m3,
        scales: Some(IndexScales { dim: 1, dtype: Dtype::F32 }),
    };
    let layer =
        LayerKind::Mla(MlaGeometry { latent_dim: 10, dtype: Dtype::Bf16, index: Some(index) });
    let model = ModelGeometry::new("sparse", vec![layer.clone(), layer]).unwrap();
    let built = |named| one(&LayoutBuilder::new(&model, named).block_tokens(3).blocks(5));
    let apart = built(NamedLayout::FlashAttentionHnd);
    assert_eq!(strides(&apart, 1, Role::Latent), (2, 0, [60, 20, 20, 2]));
    // 18 bytes of keys, 2 of padding, 12 of scales.
    assert_eq!(strides(&apart, 1, Role::IndexKey), (3, 0, [32, 6, 6, 1]));
    assert_eq!(strides(&apart, 1, Role::IndexScale), (3, 20, [32, 4, 4, 4]));
    for named in [NamedLayout::CrossLayerNhd, NamedLayout::CrossLayerHnd] {
        let across = built(named);
        // Index keys begin at a multiple of 4, so that their scales do.
        assert_eq!(strides(&across, 0, Role::IndexKey), (0, 60, [184, 6, 6, 1]));
        assert_eq!(strides(&across, 1, Role::Latent), (0, 92, [184, 20, 20, 2]));
        assert_eq!(strides(&across, 1, Role::IndexScale), (0, 152 + 20, [184, 4, 4, 4]));
        assert_eq!(across.regions()[0].bytes, 5 * 184);
    }
}

#[test]
fn scales_are_tensors_of_their_own() {
    let scales = |per| {
        small().with_dtype(Dtype::Fp8E4m3).with_scales(Some(Scales { dtype: Dtype::F32, per }))
    };
    let built = |per, named| one(&LayoutBuilder::new(&scales(per), named).blocks(10));
    let token = built(ScalePer::TokenHead, NamedLayout::FlashAttentionNhd);
    assert_eq!(strides(&token, 0, Role::KeyScale), (2, 0, [256, 16, 4, 4]));
    assert_eq!(strides(&token, 0, Role::ValueScale), (3, 0, [256, 16, 4, 4]));
    assert_eq!(token.tensor(key(0, Role::KeyScale)).unwrap().granularity, Granularity::Token);

    let block = built(ScalePer::BlockHead, NamedLayout::FlashInferHnd);
    let scale = block.tensor(key(1, Role::ValueScale)).unwrap();
    assert_eq!((scale.region, scale.granularity), (5, Granularity::Block));
    assert_eq!((scale.block, scale.token.extent), (Axis::new(10, 16), 1));
    assert_eq!((scale.head, scale.dim.extent), (Axis::new(4, 4), 1));

    // In a block of all layers they follow the values: 512 bytes of keys, of values, 256 of scales of each.
    let nhd = built(ScalePer::TokenHead, NamedLayout::CrossLayerNhd);
    assert_eq!(strides(&nhd, 1, Role::ValueScale), (0, 1536 + 1280, [3072, 16, 4, 4]));
    // And of one head: 128 bytes of keys, of values, 64 of scales of each.
    let hnd = built(ScalePer::TokenHead, NamedLayout::CrossLayerHnd);
    assert_eq!(strides(&hnd, 1, Role::Key), (0, 384, [3072, 8, 768, 1]));
    assert_eq!(strides(&hnd, 1, Role::ValueScale), (0, 384 + 320, [3072, 4, 768, 4]));
}

#[test]
fn regions_follow_the_policy() {
    let bytes = |named, policy| -> Vec<u64> {
        let layout = one(&builder(named).regions(policy));
        layout.regions().iter().map(|region| region.bytes).collect()
    };
    let flash = NamedLayout::FlashAttentionNhd;
    assert_eq!(bytes(flash, RegionPolicy::PerTensor), [10_240; 4]);
    assert_eq!(bytes(flash, RegionPolicy::PerLayer), [20_480; 2]);
    assert_eq!(bytes(flash, RegionPolicy::Single), [40_960]);
    assert_eq!(bytes(NamedLayout::FlashInferNhd, RegionPolicy::PerTensor), [20_480; 2]);
    assert_eq!(bytes(NamedLayout::FlashInferNhd, RegionPolicy::PerLayer), [20_480; 2]);
    assert_eq!(bytes(NamedLayout::CrossLayerHnd, RegionPolicy::PerTensor), [40_960]);
    assert_eq!(bytes(NamedLayout::CrossLayerHnd, RegionPolicy::Single), [40_960]);
    let cuda = one(&builder(flash).memory(MemoryKind::Cuda(3)));
    assert!(cuda.regions().iter().all(|region| region.memory == MemoryKind::Cuda(3)));
}

#[test]
fn heads_are_dealt_out_and_replicated() {
    let shards = |tp: u32| -> Vec<(u32, u32, u64)> {
        let builder = builder(NamedLayout::FlashAttentionHnd);
        let ranks = builder.build_replica(Grid::new(tp, 1, 1).unwrap(), 0).unwrap();
        let shard = |rank: &RankLayout| {
            let tensor = rank.tensor(key(0, Role::Key)).unwrap();
            (tensor.heads.first, tensor.head.extent, tensor.block.stride)
        };
        ranks.iter().map(shard).collect()
    };
    assert_eq!(shards(2), [(0, 2, 512), (2, 2, 512)]);
    assert_eq!(shards(3), [(0, 1, 256), (1, 1, 256), (2, 2, 512)]);
    // Known failures 2 and 4 (vllm PR#19691, sglang#23746): more ranks than heads.
    let replicated: Vec<_> = (0..8).map(|rank| (rank / 2, 1, 256)).collect();
    assert_eq!(shards(8), replicated);
}

/// Known failure 25 (vllm PR#22976): every rank has a number of its own, and a stage holds only its layers.
#[test]
fn a_stage_holds_only_its_layers() {
    let model = ModelGeometry::llama_like(3, 4, 8, Dtype::Bf16).unwrap();
    let builder = LayoutBuilder::new(&model, NamedLayout::FlashInferNhd);
    let ranks = builder.build_replica(Grid::new(2, 2, 1).unwrap(), 0).unwrap();
    let numbers: Vec<u32> = ranks.iter().map(|rank| rank.coords().index()).collect();
    assert_eq!(numbers, [0, 1, 2, 3]);
    let layers = |rank: &RankLayout| -> Vec<u32> {
        rank.tensors().iter().filter(|t| t.role == Role::Key).map(|t| t.layer).collect()
    };
    assert_eq!(
        ranks.iter().map(layers).collect::<Vec<_>>(),
        [vec![0, 1], vec![0, 1], vec![2], vec![2]]
    );
    // A stage without layers is a rank all the same.
    let many = builder.build_replica(Grid::new(1, 4, 1).unwrap(), 0).unwrap();
    assert_eq!((many[3].tensors().len(), many[3].groups().len()), (0, 1));
}

/// Known failures 9 and 14 (vllm PR#28925, PR#29122): sizes come from what the engine declares, never from a shape in
/// which heads or layers may stand where tokens are looked for.
#[test]
fn block_sizes_are_those_declared() {
    let model = ModelGeometry::llama_like(2, 2, 8, Dtype::Bf16).unwrap();
    for named in NamedLayout::ALL {
        let layout = one(&LayoutBuilder::new(&model, named)
            .block_tokens(128)
            .kernel_block_tokens(64)
            .blocks(3));
        let group = layout.groups()[0];
        assert_eq!((group.block_tokens, group.kernel_block_tokens, group.blocks), (128, 64, 3));
        assert_eq!(group.kernel_ratio(), 2);
        for tensor in layout.tensors() {
            assert_eq!((tensor.block.extent, tensor.token.extent), (6, 64), "{named}");
            assert_eq!(tensor.head.extent, 2, "{named}");
        }
        let plain = one(&LayoutBuilder::new(&model, named).block_tokens(16));
        assert_eq!(plain.groups()[0].kernel_ratio(), 1);
        assert!(plain.tensors().iter().all(|tensor| tensor.token.extent == 16), "{named}");
    }
}

#[test]
fn nonsense_is_refused_by_name() {
    let coords = Grid::new(1, 1, 1).unwrap().ranks().next().unwrap();
    let refused = |builder: LayoutBuilder| builder.build(coords).unwrap_err().to_string();
    let flash = builder(NamedLayout::FlashAttentionNhd);
    assert!(refused(flash.clone().blocks(0)).contains("at least 1"));
    assert!(refused(flash.clone().block_tokens(0)).contains("at least 1"));
    assert!(refused(flash.clone().kernel_block_tokens(0)).contains("at least 1"));
    let error = refused(flash.clone().kernel_block_tokens(3));
    assert!(error.contains("kernel_block_tokens 3 does not divide block_tokens 16"), "{error}");
    let error = refused(flash.clone().kernel_block_tokens(32));
    assert!(error.contains("kernel_block_tokens 32 does not divide block_tokens 16"), "{error}");
    let outside = RankCoords { tp: 1, ..coords };
    assert!(flash.build(outside).unwrap_err().to_string().contains("outside its grid"));
    let none = RankCoords { grid: Grid { tp: 0, ..coords.grid }, ..coords };
    assert!(flash.build(none).unwrap_err().to_string().contains("tp is 0"));
    assert!(flash.build_replica(none.grid, 0).unwrap_err().to_string().contains("tp is 0"));
    assert!(
        flash.build_replica(coords.grid, 1).unwrap_err().to_string().contains("outside its grid")
    );
    let huge = ModelGeometry::llama_like(1024, 1 << 16, 1 << 20, Dtype::F64).unwrap();
    for named in NamedLayout::ALL {
        let huge = LayoutBuilder::new(&huge, named).blocks(u32::MAX).block_tokens(u32::MAX);
        let error = refused(huge.kernel_block_tokens(u32::MAX));
        assert!(error.contains("2^64 bytes"), "{named}: {error}");
    }
}

#[test]
fn names_are_read_back() {
    for named in NamedLayout::ALL {
        assert_eq!(named.to_string().parse::<NamedLayout>().unwrap(), named);
        assert_eq!(serde_json::to_string(&named).unwrap(), format!("\"{named}\""));
    }
    assert_eq!("HND".parse::<NamedLayout>().unwrap(), NamedLayout::FlashAttentionHnd);
    let error = "dnh".parse::<NamedLayout>().unwrap_err().to_string();
    assert!(NamedLayout::ALL.iter().all(|named| error.contains(named.as_str())), "{error}");
}

/// All ranks of a large model, as an engine does when it starts.
#[test]
fn a_large_replica_is_built_at_once() {
    let model = ModelGeometry::preset("deepseek-v3.2").unwrap();
    let builder = LayoutBuilder::new(&model, NamedLayout::FlashInferNhd)
        .block_tokens(64)
        .blocks(10_000)
        .regions(RegionPolicy::Single);
    let grid = Grid::new(8, 1, 1).unwrap();
    let fastest = (0..20)
        .map(|_| {
            let start = std::time::Instant::now();
            assert_eq!(builder.build_replica(grid, 0).unwrap().len(), 8);
            start.elapsed()
        })
        .min()
        .unwrap();
    assert!(fastest.as_millis() < 5, "{fastest:?}");
}
