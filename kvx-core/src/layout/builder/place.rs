//! Where each area of memory begins: from pages of single layers to a rank's regions and tensors.

use super::groups::{GroupPlan, groups};
use super::{
    Axis, CacheGroup, Error, GroupKind, LayoutBuilder, Page, RankCoords, RankLayoutParts,
    RegionPolicy, RegionSpec, Result, Style, Tensor, TokenShard, View, Window, align, product, sum,
};
use crate::layout::check::check_groups;

/// Memory that has the block axis outside: `[blocks, page]`.
struct Area {
    group: u32,
    /// Which of the group's layers on this stage it belongs to; 0 where that is all of them.
    slot: usize,
    /// Which of that layer's areas it is.
    number: usize,
    page: Page,
    /// Layer and window of each of the page's views.
    owners: Vec<(u32, Window)>,
}

pub(super) fn place(builder: &LayoutBuilder, coords: RankCoords) -> Result<RankLayoutParts> {
    if builder.named.is_cross_layer() && builder.regions == RegionPolicy::PerLayer {
        return Err(Error::config("layout", "a cross-layer block has no region per layer")
            .with_context("layout", builder.named)
            .with_remedy("let each tensor be a region, or everything one"));
    }
    let plans = groups(builder);
    let groups: Vec<CacheGroup> = plans.iter().map(|plan| plan.group).collect();
    check_groups(&groups)?;
    let stage: Vec<u32> = builder.stage(coords).collect();
    let mut areas = Vec::new();
    for (group, plan) in (0_u32..).zip(&plans) {
        areas.extend(group_areas(builder, coords, &stage, group, plan)?);
    }
    let mut spots = Spots::new(builder, &groups);
    let mut tensors = Vec::new();
    for area in &areas {
        let spot = spots.find(area)?;
        let kernel_blocks = kernel_blocks(&groups[area.group as usize]);
        for (view, (layer, window)) in area.page.views.iter().zip(&area.owners) {
            tensors.push(Tensor {
                layer: *layer,
                role: view.role,
                dtype: view.dtype,
                group: area.group,
                region: spot.region,
                base: sum(spot.base, view.offset)?,
                block: Axis::new(kernel_blocks, spot.stride),
                token: view.token,
                head: view.head,
                dim: view.dim,
                heads: view.heads,
                granularity: view.granularity,
                window: *window,
                tokens: TokenShard::All,
                local_only: *layer >= builder.draft_from,
            });
        }
    }
    Ok(RankLayoutParts { coords, regions: spots.regions, groups, tensors })
}

/// Kernel blocks of a checked group.
fn kernel_blocks(group: &CacheGroup) -> u32 {
    group.blocks.saturating_mul(group.kernel_ratio())
}

/// The areas of a group's layers on this stage.
fn group_areas(
    builder: &LayoutBuilder,
    coords: RankCoords,
    stage: &[u32],
    group: u32,
    plan: &GroupPlan,
) -> Result<Vec<Area>> {
    let style = Style {
        layout: builder.named,
        conv: builder.conv_order,
        coords,
        tokens: plan.group.kernel_block_tokens,
    };
    let own = plan.layers.iter().filter(|layer| stage.binary_search(layer).is_ok());
    let mut areas = Vec::new();
    for (slot, &layer) in own.enumerate() {
        let kind = &builder.layers[layer as usize];
        let window = kind.window().unwrap_or_default();
        for (number, page) in style.pages(kind)?.into_iter().enumerate() {
            let owners = vec![(layer, window); page.views.len()];
            areas.push(Area { group, slot, number, page, owners });
        }
    }
    match builder.named {
        // With heads outside, a head is the same share of every plane. A state's parts have each their own heads.
        named
            if named.is_cross_layer_with_heads_outside()
                && plan.group.kind == GroupKind::Attention =>
        {
            let heads = common_heads(&areas)?;
            across(areas, heads)
        }
        named if named.is_cross_layer() => across(areas, 1),
        _ => Ok(areas),
    }
}

/// Puts the pages of all layers of a group side by side in one block: whole pages, or the share that each of their `heads`
/// has of them, head after head.
fn across(areas: Vec<Area>, heads: u32) -> Result<Vec<Area>> {
    let Some(group) = areas.first().map(|area| area.group) else { return Ok(areas) };
    let mut all = Area {
        group,
        slot: 0,
        number: 0,
        page: Page { bytes: 0, views: Vec::new() },
        owners: Vec::new(),
    };
    let mut widest = 1;
    for area in areas {
        for view in &area.page.views {
            widest = widest.max(view.dtype.bytes());
        }
        let at = align(all.page.bytes, page_align(&area.page))?;
        let share = area.page.bytes / u64::from(heads);
        for mut view in area.page.views {
            // Of a page `[planes, heads, rows]` a head takes its share of each plane; in `[heads, rows]` it is one run.
            if view.head.stride != share {
                view.offset /= u64::from(heads);
            }
            view.offset = sum(at, view.offset)?;
            all.page.views.push(view);
        }
        all.page.bytes = sum(at, share)?;
        all.owners.extend(area.owners);
    }
    let row = align(all.page.bytes, widest)?;
    if heads > 1 {
        for view in &mut all.page.views {
            outside(view, row);
        }
    }
    all.page.bytes = product(&[row, heads.into()])?;
    Ok(vec![all])
}

/// Heads move outside: all of one head's rows are together, then the next head's.
fn outside(view: &mut View, row: u64) {
    if view.head.extent > 1 && view.head.stride < view.token.stride {
        // A scale's plane is `[tokens, heads]`.
        view.token.stride /= u64::from(view.head.extent);
    }
    view.head.stride = row;
}

/// The heads that every page of a group has, where these are to be outside.
fn common_heads(areas: &[Area]) -> Result<u32> {
    let mut all = areas.iter().flat_map(|area| {
        area.page
            .views
            .iter()
            .zip(&area.owners)
            .map(|(view, (layer, _))| (view.head.extent, *layer))
    });
    let Some((first, _)) = all.next() else { return Ok(1) };
    match all.find(|(heads, _)| *heads != first) {
        None => Ok(first),
        Some((heads, layer)) => Err(Error::config(
            "layout",
            format!("{heads} heads in layer {layer}, {first} in another of its group"),
        )
        .with_remedy("use a cross-layer layout that has its heads inside each layer")),
    }
}

fn page_align(page: &Page) -> u64 {
    page.views.iter().map(|view| view.dtype.bytes()).max().unwrap_or(1)
}

/// Where an area begins, and the distance between two of its blocks.
#[derive(Clone, Copy)]
struct Spot {
    region: u32,
    base: u64,
    stride: u64,
}

/// Finds a spot for each area.
struct Spots<'a> {
    builder: &'a LayoutBuilder,
    groups: &'a [CacheGroup],
    regions: Vec<RegionSpec>,
    /// Group and slot of the area that began last.
    last: Option<(u32, usize)>,
    /// With aliased groups: what is already placed.
    placed: Vec<Placed>,
}

/// An area that those of other groups may share.
struct Placed {
    slot: usize,
    number: usize,
    group: u32,
    /// Logical blocks, and bytes of one.
    blocks: u32,
    bytes: u64,
    spot: Spot,
}

impl<'a> Spots<'a> {
    fn new(builder: &'a LayoutBuilder, groups: &'a [CacheGroup]) -> Self {
        Self { builder, groups, regions: Vec::new(), last: None, placed: Vec::new() }
    }

    fn find(&mut self, area: &Area) -> Result<Spot> {
        if !self.builder.alias_groups {
            return self.append(area);
        }
        let group = &self.groups[area.group as usize];
        let bytes = product(&[area.page.bytes, group.kernel_ratio().into()])?;
        let same = |placed: &&Placed| (placed.slot, placed.number) == (area.slot, area.number);
        let Some(placed) = self.placed.iter().find(same) else {
            let spot = self.append(area)?;
            let (slot, number) = (area.slot, area.number);
            let (group, blocks) = (area.group, group.blocks);
            self.placed.push(Placed { slot, number, group, blocks, bytes, spot });
            return Ok(spot);
        };
        // A state is padded to the size of the blocks that it takes the place of.
        let fits = placed.bytes == bytes || group.kind == GroupKind::State && bytes < placed.bytes;
        if placed.blocks != group.blocks || !fits {
            let (one, other) = (placed.group, area.group);
            return Err(Error::config(
                "layout",
                format!(
                    "groups {one} and {other} cannot share memory: {} blocks of {} bytes, and {} of {bytes}",
                    placed.blocks, placed.bytes, group.blocks
                ),
            )
            .with_remedy("choose block_tokens and blocks so that they agree, or do not alias groups"));
        }
        Ok(Spot { stride: placed.bytes / u64::from(group.kernel_ratio()), ..placed.spot })
    }

    /// Puts an area after those before it, in a region of its own where the policy says so.
    fn append(&mut self, area: &Area) -> Result<Spot> {
        let stride = area.page.bytes;
        let blocks = kernel_blocks(&self.groups[area.group as usize]);
        let layer = (area.group, area.slot);
        let fresh = match self.builder.regions {
            RegionPolicy::PerTensor => true,
            RegionPolicy::PerLayer => self.last != Some(layer),
            RegionPolicy::Single => false,
        };
        self.last = Some(layer);
        if fresh || self.regions.is_empty() {
            self.regions.push(RegionSpec { bytes: 0, memory: self.builder.memory });
        }
        let number = self.regions.len() - 1;
        let end = &mut self.regions[number].bytes;
        let base = align(*end, page_align(&area.page))?;
        *end = sum(base, product(&[stride, blocks.into()])?)?;
        // As many as there are areas of at most 1,024 layers.
        let region = u32::try_from(number).unwrap_or(u32::MAX);
        Ok(Spot { region, base, stride })
    }
}
