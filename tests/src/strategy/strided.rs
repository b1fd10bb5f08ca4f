//! Layouts that no engine has: axes in any order, gaps anywhere, tensors interleaved in any way.

use kvx_core::Result;
use kvx_core::layout::{Axis, RankLayout, RankLayoutParts, RegionSpec, Tensor};
use proptest::collection::vec;
use proptest::prelude::*;

/// Choices, one after the other. When they have run out, every choice is the first one, which is always the simplest, so
/// that a shorter tape makes a simpler layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tape(pub Vec<u8>);

/// Up to 120 choices.
pub fn tape() -> impl Strategy<Value = Tape> {
    vec(any::<u8>(), 0..120).prop_map(Tape)
}

struct Reader<'a> {
    tape: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    /// A number below `options`.
    fn pick(&mut self, options: usize) -> usize {
        let choice = self.tape.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        usize::from(choice) % options.max(1)
    }

    /// Bytes of a gap: none in half of all cases.
    fn gap(&mut self) -> u64 {
        [0, 0, 0, 0, 1, 2, 8, 3][self.pick(8)]
    }
}

const AXES: [fn(&mut Tensor) -> &mut Axis; 4] = [
    |tensor| &mut tensor.block,
    |tensor| &mut tensor.token,
    |tensor| &mut tensor.head,
    |tensor| &mut tensor.dim,
];

/// A tensor that is being laid out, from the outermost axis inwards.
struct Item {
    tensor: Tensor,
    /// Axes that have no stride yet: indices into [`AXES`].
    left: Vec<usize>,
}

impl Item {
    fn extent(&mut self, axis: usize) -> u32 {
        AXES[axis](&mut self.tensor).extent
    }
}

/// The same layout (same ranks, groups, tensors and extents) with everything in other places: each tensor in one of up to
/// three regions, its axes in any order, gaps between their positions, and tensors packed into each other along the axes that they
/// have in common. The choices are taken from `tape`, from place `start` on. With no choices: one region, tensors one after
/// the other, `[block, token, head, dim]`, no gaps.
///
/// A layout whose tensors lie across each other in more rows than [`RankLayout::new`] compares is made again with half of the
/// tape, which is simpler.
///
/// # Errors
///
/// As for [`RankLayout::new`]; it should not fail for layouts that are not absurdly large.
pub fn restride(layout: RankLayout, tape: &Tape, start: usize) -> Result<RankLayout> {
    let mut choices = &*tape.0;
    loop {
        let parts = place(layout.clone().into_parts(), Reader { tape: choices, at: start });
        match RankLayout::new(parts) {
            Err(error) if error.message().contains("too many rows") && !choices.is_empty() => {
                choices = &choices[..choices.len() / 2];
            }
            result => return result,
        }
    }
}

fn place(parts: RankLayoutParts, mut reader: Reader<'_>) -> RankLayoutParts {
    let RankLayoutParts { coords, groups, tensors, .. } = parts;
    let count = 1 + reader.pick(3);
    let mut shelves: Vec<Vec<Item>> = (0..count).map(|_| Vec::new()).collect();
    for tensor in tensors {
        let region = reader.pick(count);
        shelves[region].push(Item { tensor, left: vec![0, 1, 2, 3] });
    }
    let mut regions = Vec::new();
    let mut tensors = Vec::new();
    for (region, mut shelf) in (0_u32..).zip(shelves) {
        let start = reader.gap();
        let bytes = start + lay(&mut shelf, &mut reader);
        let spare = reader.gap();
        regions.push(RegionSpec {
            bytes: (bytes + spare).max(1),
            memory: kvx_core::memory::MemoryKind::Host,
        });
        tensors.extend(shelf.into_iter().map(|item| {
            let base = start + item.tensor.base;
            Tensor { region, base, ..item.tensor }
        }));
    }
    let mut parts = RankLayoutParts { coords, regions, groups, tensors };
    for _ in 0..reader.pick(4) {
        nudge(&mut parts, &mut reader);
    }
    parts
}

/// Gives strides to what has none, and offsets from the first byte of all of these; returns how many bytes they take.
fn lay(items: &mut [Item], reader: &mut Reader<'_>) -> u64 {
    match items {
        [] => return 0,
        [item] if item.left.is_empty() => {
            item.tensor.base = 0;
            return item.tensor.dtype.bytes();
        }
        _ => {}
    }
    let common = common_axes(items);
    // Tensors that have no axis in common, or are not to share one here, lie one after the other.
    let apart = items.len() > 1 && (common.is_empty() || reader.pick(2) == 0);
    if apart {
        let swap = reader.pick(items.len());
        items.swap(0, swap);
        let middle = 1 + reader.pick(items.len() - 1);
        let (left, right) = items.split_at_mut(middle);
        let bytes = lay(left, reader) + reader.gap();
        let more = lay(right, reader);
        for item in right {
            item.tensor.base += bytes;
        }
        return bytes + more;
    }
    let axis = common[reader.pick(common.len())];
    for item in items.iter_mut() {
        item.left.retain(|left| *left != axis);
    }
    let inner = lay(items, reader);
    let stride = inner + reader.gap();
    let extent = items[0].extent(axis);
    // Along an axis of one position a stride means nothing, so it may be anything.
    let stated = if extent == 1 { [stride, 0, 1, 1 << 40][reader.pick(4)] } else { stride };
    for item in items.iter_mut() {
        AXES[axis](&mut item.tensor).stride = stated;
    }
    let mut steps = u64::from(extent - 1);
    if items.len() > 1 && extent > 1 && reader.pick(4) == 3 {
        // One of them leaves out every other position, and still lies where no other does.
        let item = reader.pick(items.len());
        AXES[axis](&mut items[item].tensor).stride = 2 * stride;
        steps *= 2;
    }
    stride * steps + inner
}

/// Axes that all items have left, with the same extent.
fn common_axes(items: &mut [Item]) -> Vec<usize> {
    let Some((first, rest)) = items.split_first_mut() else { return Vec::new() };
    let mut common = first.left.clone();
    common.retain(|axis| {
        let extent = first.extent(*axis);
        rest.iter_mut().all(|item| item.left.contains(axis) && item.extent(*axis) == extent)
    });
    common
}

/// Moves one tensor to another place, if it fits there between the others.
fn nudge(parts: &mut RankLayoutParts, reader: &mut Reader<'_>) {
    if parts.tensors.is_empty() {
        return;
    }
    let number = reader.pick(parts.tensors.len());
    let place = reader.pick(256) * 256 + reader.pick(256);
    let mut moved = parts.clone();
    let tensor = &mut moved.tensors[number];
    let room = parts.regions[tensor.region as usize].bytes;
    let Some(last) = tensor.span().and_then(|span| room.checked_sub(span)) else { return };
    tensor.base = place as u64 % (last + 1);
    if disjoint(&moved) {
        *parts = moved;
    }
}

/// Whether no two elements share a byte, also of different groups.
fn disjoint(parts: &RankLayoutParts) -> bool {
    let mut taken: Vec<Vec<bool>> = parts
        .regions
        .iter()
        .map(|region| vec![false; usize::try_from(region.bytes).unwrap_or(0)])
        .collect();
    for tensor in &parts.tensors {
        let mut starts = vec![tensor.base];
        for axis in [tensor.block, tensor.token, tensor.head, tensor.dim] {
            starts = (0..u64::from(axis.extent))
                .flat_map(|i| starts.iter().map(move |at| at + i * axis.stride))
                .collect();
        }
        let region = &mut taken[tensor.region as usize];
        for start in starts {
            for byte in start..start + tensor.dtype.bytes() {
                match usize::try_from(byte).ok().and_then(|byte| region.get_mut(byte)) {
                    Some(free) if !*free => *free = true,
                    _ => return false,
                }
            }
        }
    }
    true
}
