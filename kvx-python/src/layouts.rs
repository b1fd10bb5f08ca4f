//! What a model keeps per token, and where it lies in a rank's memory.

use std::path::PathBuf;

use kvx_core::facts::Facts;
use kvx_core::layout::{
    ConvOrder, Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, RegionPolicy,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyString};

use crate::number::Whole;
use crate::{error, objects};

/// What a model's layers keep per token.
#[pyclass(frozen, name = "Model", module = "kvx")]
pub(crate) struct PyModel {
    pub(crate) model: ModelGeometry,
}

#[pymethods]
impl PyModel {
    /// The model that a Hugging Face ``config.json`` describes: the path of one, of a directory that holds one, or what it says, as a
    /// mapping.
    #[staticmethod]
    fn from_config(config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = if let Ok(mapping) = config.cast::<PyMapping>() {
            let json = config.py().import("json")?;
            let kwargs = PyDict::new(config.py());
            kwargs.set_item("default", config.py().get_type::<PyString>())?;
            let plain = config.py().get_type::<PyDict>().call1((mapping,))?;
            json.call_method("dumps", (plain,), Some(&kwargs))?.extract::<String>()?
        } else {
            let mut path: PathBuf = config.extract().map_err(|_| {
                PyTypeError::new_err(
                    "config must be a path, or what a config.json says as a mapping",
                )
            })?;
            if path.is_dir() {
                path.push("config.json");
            }
            // By Python, whose errors name the file.
            let path = config.py().import("pathlib")?.getattr("Path")?.call1((path,))?;
            path.call_method1("read_text", ("utf-8",))?.extract()?
        };
        ModelGeometry::from_hf_config(&text).map(|model| Self { model }).map_err(error::raise)
    }

    /// A well-known model, by one of the names that ``presets`` lists: what its ``config.json`` says, in bf16.
    #[staticmethod]
    fn preset(name: &str) -> PyResult<Self> {
        ModelGeometry::preset(name).map(|model| Self { model }).map_err(error::raise)
    }

    /// The names of all presets.
    #[staticmethod]
    fn presets() -> Vec<&'static str> {
        ModelGeometry::PRESETS.to_vec()
    }

    /// A model whose layers all keep ``kv_heads`` heads of ``head_dim`` elements, with full attention.
    #[staticmethod]
    #[pyo3(signature = (layers, kv_heads, head_dim, dtype = "bf16"))]
    fn llama_like(
        layers: Whole<u32>,
        kv_heads: Whole<u32>,
        head_dim: Whole<u32>,
        dtype: &str,
    ) -> PyResult<Self> {
        let dtype: Dtype = dtype.parse().map_err(error::raise)?;
        ModelGeometry::llama_like(layers.0, kv_heads.0, head_dim.0, dtype)
            .map(|model| Self { model })
            .map_err(error::raise)
    }

    /// A model whose layers all keep a latent of ``latent_dim`` elements per token.
    #[staticmethod]
    #[pyo3(signature = (layers, latent_dim, dtype = "bf16"))]
    fn mla_like(layers: Whole<u32>, latent_dim: Whole<u32>, dtype: &str) -> PyResult<Self> {
        let dtype: Dtype = dtype.parse().map_err(error::raise)?;
        ModelGeometry::mla_like(layers.0, latent_dim.0, dtype)
            .map(|model| Self { model })
            .map_err(error::raise)
    }

    /// The model's name.
    #[getter]
    fn name(&self) -> &str {
        self.model.name()
    }

    /// How many layers it has, those without a cache included.
    #[getter]
    fn num_layers(&self) -> u32 {
        self.model.num_layers()
    }

    /// Bytes that one token takes in all layers, over all heads.
    #[getter]
    fn bytes_per_token(&self) -> u64 {
        self.model.bytes_per_token()
    }

    /// What each layer keeps.
    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects::of(py, &self.model.layers())
    }

    /// What two engines must agree on, by name.
    #[getter]
    fn facts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let facts: Facts = self.model.facts().map_err(error::raise)?;
        let shown = PyDict::new(py);
        for (name, fact) in facts.iter() {
            shown.set_item(name, fact.value())?;
        }
        Ok(shown)
    }

    /// The layouts of all ranks of one data parallel replica: by pipeline stage, and then by tensor parallel rank.
    ///
    /// ``named`` is one of ``Layout.names()``. ``blocks`` and ``block_tokens`` are those of the block table: the engine's logical blocks.
    /// ``regions`` says which tensors share a region: ``tensor``, ``layer`` or ``single``.
    #[pyo3(signature = (
        named, *, blocks, block_tokens, tp = Whole(1), pp = Whole(1), replicas = Whole(1), replica = Whole(0),
        kernel_block_tokens = None, window_blocks = None, window_block_tokens = None, state_blocks = None,
        regions = "tensor", group_by_window = false, group_layers = None, alias_groups = false, null_block = None,
        conv_order = None, draft = None
    ), text_signature = "(self, named, *, blocks, block_tokens, tp=1, pp=1, replicas=1, replica=0, kernel_block_tokens=None, window_blocks=None, window_block_tokens=None, state_blocks=None, regions='tensor', group_by_window=False, group_layers=None, alias_groups=False, null_block=None, conv_order=None, draft=None)")]
    #[expect(clippy::too_many_arguments, reason = "all but three by name, with a default")]
    fn layouts(
        &self,
        py: Python<'_>,
        named: &str,
        blocks: Whole<u32>,
        block_tokens: Whole<u32>,
        tp: Whole<u32>,
        pp: Whole<u32>,
        replicas: Whole<u32>,
        replica: Whole<u32>,
        kernel_block_tokens: Option<Whole<u32>>,
        window_blocks: Option<Whole<u32>>,
        window_block_tokens: Option<Whole<u32>>,
        state_blocks: Option<Whole<u32>>,
        regions: &str,
        group_by_window: bool,
        group_layers: Option<Whole<u32>>,
        alias_groups: bool,
        null_block: Option<Whole<u32>>,
        conv_order: Option<&str>,
        draft: Option<&Self>,
    ) -> PyResult<Vec<PyLayout>> {
        let named: NamedLayout = named.parse().map_err(error::raise)?;
        let grid = Grid::new(tp.0, pp.0, replicas.0).map_err(error::raise)?;
        let mut builder = LayoutBuilder::new(&self.model, named)
            .blocks(blocks.0)
            .block_tokens(block_tokens.0)
            .regions(policy(regions)?)
            .group_by_window(group_by_window)
            .alias_groups(alias_groups)
            .null_block(null_block.map(|block| block.0));
        if let Some(Whole(tokens)) = kernel_block_tokens {
            builder = builder.kernel_block_tokens(tokens);
        }
        if let Some(Whole(blocks)) = window_blocks {
            builder = builder.window_blocks(blocks);
        }
        if let Some(Whole(tokens)) = window_block_tokens {
            builder = builder.window_block_tokens(tokens);
        }
        if let Some(Whole(blocks)) = state_blocks {
            builder = builder.state_blocks(blocks);
        }
        if let Some(Whole(layers)) = group_layers {
            builder = builder.group_layers(layers);
        }
        if let Some(order) = conv_order {
            builder = builder.conv_order(conv(order)?);
        }
        if let Some(draft) = draft {
            builder = builder.draft(&draft.model);
        }
        let layouts = py.detach(|| builder.build_replica(grid, replica.0)).map_err(error::raise)?;
        Ok(layouts.into_iter().map(|layout| PyLayout { layout }).collect())
    }

    fn __repr__(&self) -> String {
        let (name, layers) = (self.model.name(), self.model.num_layers());
        format!(
            "Model({name:?}, {layers} layers, {} bytes per token)",
            self.model.bytes_per_token()
        )
    }
}

fn conv(order: &str) -> PyResult<ConvOrder> {
    match order {
        "channels-outside" => Ok(ConvOrder::ChannelsOutside),
        "taps-outside" => Ok(ConvOrder::TapsOutside),
        _ => Err(PyValueError::new_err(format!(
            "conv_order={order:?}; there is \"channels-outside\" and \"taps-outside\""
        ))),
    }
}

fn policy(regions: &str) -> PyResult<RegionPolicy> {
    match regions {
        "tensor" => Ok(RegionPolicy::PerTensor),
        "layer" => Ok(RegionPolicy::PerLayer),
        "single" => Ok(RegionPolicy::Single),
        _ => Err(PyValueError::new_err(format!(
            "regions={regions:?}; there is \"tensor\", \"layer\" and \"single\""
        ))),
    }
}

/// Where everything lies in one rank's memory. Checked when it is made: every element is inside its region, and no two share a byte.
#[pyclass(frozen, name = "Layout", module = "kvx")]
pub(crate) struct PyLayout {
    pub(crate) layout: RankLayout,
}

#[pymethods]
impl PyLayout {
    /// The names of all layouts that ``Model.layouts`` makes.
    #[staticmethod]
    fn names() -> Vec<&'static str> {
        NamedLayout::ALL.iter().map(|named| named.as_str()).collect()
    }

    /// A layout of these parts, in the form that ``to_dict`` gives: for what has no name.
    #[staticmethod]
    fn from_dict(parts: &Bound<'_, PyDict>) -> PyResult<Self> {
        objects::read(parts.as_any(), "layout").map(|layout| Self { layout })
    }

    /// All of it: ``coords``, ``regions``, ``groups``, ``tensors``.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects::of(py, &self.layout)
    }

    /// Where the rank stands: ``tp``, ``pp``, ``dp``, and the ``grid`` of all ranks.
    #[getter]
    fn coords<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects::of(py, self.layout.coords())
    }

    /// Bytes of each region that it needs, in order.
    #[getter]
    fn region_bytes(&self) -> Vec<u64> {
        self.layout.regions().iter().map(|region| region.bytes).collect()
    }

    /// Its cache groups: what has a block table of its own.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects::of(py, &self.layout.groups())
    }

    /// Its tensors: layer, role, element type, group, region, the offset of the first element, and extent and stride in bytes of each axis.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects::of(py, &self.layout.tensors())
    }

    fn __repr__(&self) -> String {
        let (coords, layout) = (self.layout.coords(), &self.layout);
        let (tensors, regions) = (layout.tensors().len(), layout.regions().len());
        format!("Layout({coords} of {}, {tensors} tensors in {regions} regions)", coords.grid)
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.layout == other.layout
    }
}
