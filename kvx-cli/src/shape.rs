//! The shape of an engine, as it is written on the command line: `tp=2,layout=hnd,block=16`.

use std::fmt;
use std::str::FromStr;

use kvx_core::layout::{
    ConvOrder, Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, RegionPolicy,
};
use kvx_core::{Error, Result};
use serde::Serialize;

use crate::size;

/// How an engine is cut into ranks and how each lays its cache out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Its ranks.
    pub(crate) grid: Grid,
    /// Tokens per logical block.
    pub(crate) block_tokens: u32,
    /// Tokens per block of the attention kernel, where that is smaller.
    pub(crate) kernel_tokens: Option<u32>,
    /// The layout of each rank.
    pub(crate) layout: NamedLayout,
    /// Blocks in each rank's pool; `None`: as many as are needed.
    pub(crate) blocks: Option<u32>,
    /// Which tensors share a region.
    pub(crate) regions: RegionPolicy,
    /// Layers with a window have a block table of their own.
    pub(crate) groups: Groups,
    /// What is side by side in a convolution state.
    pub(crate) conv: ConvOrder,
    /// Element type of keys, values and latents, where it is not the model's.
    pub(crate) dtype: Option<Dtype>,
}

/// Which layers share a block table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Groups {
    /// All attention layers, whatever their windows.
    #[default]
    Shared,
    /// Those of the same window.
    Window,
}

/// Most layers that are laid out, those of all ranks of one replica: a few seconds, and some hundred megabytes.
const MAX_LAYERS: u64 = 1 << 17;

/// What each key means, in the order in which they are printed.
const KEYS: [(&str, &str); 11] = [
    ("tp", "tensor parallel ranks"),
    ("pp", "pipeline parallel ranks"),
    ("dp", "data parallel replicas"),
    ("block", "tokens per block"),
    ("kernel", "tokens per block of the attention kernel"),
    ("layout", "layout of the blocks"),
    ("blocks", "blocks in the pool"),
    ("regions", "tensor, layer or single"),
    ("groups", "shared or window"),
    ("conv", "channels or taps"),
    ("dtype", "element type"),
];

const REGIONS: [(&str, RegionPolicy); 3] = [
    ("tensor", RegionPolicy::PerTensor),
    ("layer", RegionPolicy::PerLayer),
    ("single", RegionPolicy::Single),
];
const GROUPS: [(&str, Groups); 2] = [("shared", Groups::Shared), ("window", Groups::Window)];
const CONV: [(&str, ConvOrder); 2] =
    [("channels", ConvOrder::ChannelsOutside), ("taps", ConvOrder::TapsOutside)];

impl Shape {
    /// `tp` ranks with blocks of `block_tokens` tokens in this layout, each tensor a region of its own.
    ///
    /// # Errors
    ///
    /// As for [`Grid::new`].
    pub(crate) fn new(tp: u32, layout: NamedLayout, block_tokens: u32) -> Result<Self> {
        Ok(Self {
            grid: Grid::new(tp, 1, 1)?,
            block_tokens,
            kernel_tokens: None,
            layout,
            blocks: None,
            regions: RegionPolicy::PerTensor,
            groups: Groups::default(),
            conv: ConvOrder::default(),
            dtype: None,
        })
    }

    /// This shape with what `text` says changed: `key=value`, separated by commas, any of the keys in any order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config), naming `option` and the key: a key that there is not (the error
    /// lists those that there are), a key given twice, a value that cannot be.
    pub(crate) fn changed_by(mut self, option: &'static str, text: &str) -> Result<Self> {
        let mut seen: Vec<&str> = Vec::new();
        let (mut tp, mut pp, mut dp) = (self.grid.tp, self.grid.pp, self.grid.dp);
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| {
                Error::config(option, format!("{part:?} is not key=value")).with_remedy(known())
            })?;
            let (key, value) = (key.trim(), value.trim());
            if seen.contains(&key) {
                return Err(Error::config(option, format!("{key} is given twice")));
            }
            seen.push(key);
            match key {
                "tp" => tp = number(option, key, value)?,
                "pp" => pp = number(option, key, value)?,
                "dp" => dp = number(option, key, value)?,
                "block" => self.block_tokens = number(option, key, value)?,
                "kernel" => self.kernel_tokens = Some(number(option, key, value)?),
                "blocks" => self.blocks = Some(number(option, key, value)?),
                "layout" => self.layout = parsed(option, value)?,
                "dtype" => self.dtype = Some(parsed(option, value)?),
                "regions" => self.regions = one_of(option, key, value, &REGIONS)?,
                "groups" => self.groups = one_of(option, key, value, &GROUPS)?,
                "conv" => self.conv = one_of(option, key, value, &CONV)?,
                _ => {
                    return Err(Error::config(option, format!("there is no key {key:?}"))
                        .with_remedy(known()));
                }
            }
        }
        if let Some(kernel) = self.kernel_tokens
            && !self.block_tokens.is_multiple_of(kernel)
        {
            let block = self.block_tokens;
            return Err(Error::config(
                option,
                format!("kernel={kernel} does not divide block={block}"),
            )
            .with_remedy("give a block= that is a multiple of kernel="));
        }
        self.grid = Grid::new(tp, pp, dp).map_err(|error| error.with_context("option", option))?;
        Ok(self)
    }

    /// The model as this engine keeps it.
    #[must_use]
    pub(crate) fn model(&self, model: &ModelGeometry) -> ModelGeometry {
        match self.dtype {
            Some(dtype) => model.clone().with_dtype(dtype),
            None => model.clone(),
        }
    }

    /// Makes the layouts of its ranks, with `blocks` blocks of which number 0 is the null block; with `states` blocks for
    /// states, where that is another number.
    #[must_use]
    pub(crate) fn builder(
        &self,
        model: &ModelGeometry,
        blocks: u32,
        states: Option<u32>,
    ) -> LayoutBuilder {
        let builder = LayoutBuilder::new(&self.model(model), self.layout)
            .block_tokens(self.block_tokens)
            .blocks(blocks)
            .regions(self.regions)
            .group_by_window(self.groups == Groups::Window)
            .conv_order(self.conv)
            .state_blocks(states.unwrap_or(blocks))
            .null_block(Some(0));
        match self.kernel_tokens {
            Some(tokens) => builder.kernel_block_tokens(tokens),
            None => builder,
        }
    }

    /// The layouts of the ranks of one data parallel replica.
    ///
    /// # Errors
    ///
    /// As for [`LayoutBuilder::build`]; and [`ErrorKind::Config`](kvx_core::ErrorKind::Config) where all ranks together have
    /// more than [`MAX_LAYERS`] layers.
    pub(crate) fn ranks(
        &self,
        model: &ModelGeometry,
        blocks: u32,
        states: Option<u32>,
        dp: u32,
    ) -> Result<Vec<RankLayout>> {
        let (tp, layers) = (u64::from(self.grid.tp), u64::from(model.num_layers()));
        if tp * layers > MAX_LAYERS {
            let most = MAX_LAYERS / layers.max(1);
            return Err(Error::config(
                "shape",
                format!(
                    "tp={tp} ranks of {layers} layers are {} layers to lay out",
                    size::count(tp * layers)
                ),
            )
            .with_context("limit", size::count(MAX_LAYERS))
            .with_remedy(format!("give tp={most} or less for this model")));
        }
        self.builder(model, blocks, states).build_replica(self.grid, dp)
    }
}

/// As it can be read again: sizes of 1 and what is as usual left out.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Grid { tp, pp, dp } = self.grid;
        write!(f, "tp={tp}")?;
        for (key, size) in [("pp", pp), ("dp", dp)] {
            if size != 1 {
                write!(f, ",{key}={size}")?;
            }
        }
        write!(f, ",layout={},block={}", self.layout, self.block_tokens)?;
        if let Some(tokens) = self.kernel_tokens {
            write!(f, ",kernel={tokens}")?;
        }
        if let Some(blocks) = self.blocks {
            write!(f, ",blocks={blocks}")?;
        }
        if let Some((name, _)) = REGIONS.iter().skip(1).find(|(_, v)| *v == self.regions) {
            write!(f, ",regions={name}")?;
        }
        if let Some((name, _)) = GROUPS.iter().skip(1).find(|(_, v)| *v == self.groups) {
            write!(f, ",groups={name}")?;
        }
        if let Some((name, _)) = CONV.iter().skip(1).find(|(_, v)| *v == self.conv) {
            write!(f, ",conv={name}")?;
        }
        match self.dtype {
            Some(dtype) => write!(f, ",dtype={dtype}"),
            None => Ok(()),
        }
    }
}

impl Serialize for Shape {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn known() -> String {
    let keys: Vec<_> = KEYS.iter().map(|(key, what)| format!("{key} ({what})")).collect();
    format!("write key=value, separated by commas; the keys are {}", keys.join(", "))
}

fn number(option: &'static str, key: &str, value: &str) -> Result<u32> {
    value.parse().ok().filter(|number| *number > 0).ok_or_else(|| {
        Error::config(option, format!("{key}={value} is not a number from 1 to {}", u32::MAX))
    })
}

fn parsed<T: FromStr<Err = Error>>(option: &'static str, value: &str) -> Result<T> {
    value.parse().map_err(|error: Error| error.with_context("option", option))
}

fn one_of<T: Copy>(option: &'static str, key: &str, value: &str, table: &[(&str, T)]) -> Result<T> {
    table.iter().find(|(name, _)| *name == value).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = table.iter().map(|(name, _)| *name).collect();
        Error::config(option, format!("{key}={value} is not known"))
            .with_remedy(format!("use one of {}", names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Shape {
        Shape::new(2, NamedLayout::FlashAttentionHnd, 16).unwrap()
    }

    #[test]
    fn any_subset_of_the_keys_is_read() {
        let shape = base().changed_by("--producer", "").unwrap();
        assert_eq!(shape, base());
        let shape = base().changed_by("--producer", " tp=4, layout=nhd ,").unwrap();
        assert_eq!(shape.grid.tp, 4);
        assert_eq!(shape.layout, NamedLayout::FlashAttentionNhd);
        assert_eq!(shape.block_tokens, 16);
        let all = "tp=3,pp=2,dp=4,layout=packed-hnd,block=64,kernel=32,blocks=9,regions=single,\
                   groups=window,conv=taps,dtype=fp8_e4m3";
        let shape = base().changed_by("--producer", all).unwrap();
        assert_eq!(shape.to_string(), all);
        assert_eq!(KEYS.len(), all.split(',').count());
        for part in all.split(',') {
            let key = part.split_once('=').unwrap().0;
            assert!(KEYS.iter().any(|(known, _)| *known == key), "{key}");
        }
    }

    #[test]
    fn what_is_printed_can_be_read_again() {
        for text in ["", "pp=2", "regions=layer,dp=2", "kernel=8", "groups=window", "dtype=f16"] {
            let shape = base().changed_by("--producer", text).unwrap();
            let again = Shape::new(7, NamedLayout::Pallas, 99).unwrap();
            assert_eq!(again.changed_by("--consumer", &shape.to_string()).unwrap(), shape);
        }
    }

    #[test]
    fn a_wrong_shape_is_refused_by_name() {
        for (text, says) in [
            ("tq=2", "there is no key \"tq\""),
            ("tq=2", "tp (tensor parallel ranks)"),
            ("tp", "\"tp\" is not key=value"),
            ("tp=0", "tp=0 is not a number"),
            ("tp=x", "tp=x is not a number"),
            ("tp=1,tp=2", "tp is given twice"),
            ("tp=65536,pp=2", "65,536 ranks"),
            ("layout=zyx", "flash-attention-nhd"),
            ("regions=two", "tensor, layer, single"),
            ("groups=two", "shared, window"),
            ("conv=two", "channels, taps"),
            ("dtype=two", "bf16"),
            ("block=-1", "block=-1"),
        ] {
            let error = base().changed_by("--producer", text).unwrap_err();
            assert_eq!(error.kind(), kvx_core::ErrorKind::Config);
            let error = error.to_string();
            assert!(error.contains(says) && error.contains("--producer"), "{text}: {error}");
        }
    }
}
