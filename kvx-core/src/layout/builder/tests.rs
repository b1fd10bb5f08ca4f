use super::super::{Dtype, HeadShard, Role, TensorKey};
use super::*;

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
    let refusal = builder(NamedLayout::CrossLayerNhd).regions(RegionPolicy::PerLayer);
    assert!(refusal.build(*nhd.coords()).unwrap_err().to_string().contains("cross-layer"));
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
