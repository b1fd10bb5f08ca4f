//! One tensor's elements inside one block pair, as strided loops around a contiguous run.

/// One axis, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AxisPair {
    pub(super) extent: u32,
    /// Byte stride where it is written.
    pub(super) to: u64,
    /// Byte stride where it is read.
    pub(super) from: u64,
}

/// How a tensor's elements lie inside a block on both sides. Shared by all tensors that lie alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes that are contiguous on both sides whatever the tokens: an element, or a row of them.
    pub(super) unit: u64,
    /// Strides of the token axis; `None` for what is kept once per block.
    pub(super) token: Option<(u64, u64)>,
    /// The other axes, of extents over 1, shortest stride (where written) first.
    pub(super) axes: Vec<AxisPair>,
}

impl Shape {
    pub(super) fn new(unit: u64, token: Option<(u64, u64)>, mut axes: Vec<AxisPair>) -> Self {
        axes.retain(|axis| axis.extent > 1);
        axes.sort_by_key(|axis| axis.to);
        let mut shape = Self { unit, token, axes };
        // Axes inside the token axis fold into the unit once and for all.
        while let Some(axis) = shape.axes.first().copied() {
            let inner = shape.token.is_none_or(|(to, _)| axis.to < to);
            if !(inner && axis.to == shape.unit && axis.from == shape.unit) {
                break;
            }
            shape.unit *= u64::from(axis.extent);
            shape.axes.remove(0);
        }
        shape
    }

    /// The loops for `tokens` neighbouring tokens.
    pub(super) fn fold(&self, tokens: u32) -> Folded {
        let mut folded = Folded { run: self.unit, loops: [NO_LOOP; MAX_LOOPS], depth: 0 };
        let mut token = self.token.filter(|_| tokens > 1).map(|(to, from)| AxisPair {
            extent: tokens,
            to,
            from,
        });
        for axis in &self.axes {
            if let Some(inner) = token.filter(|token| token.to < axis.to) {
                folded.wrap(inner);
                token = None;
            }
            folded.wrap(*axis);
        }
        if let Some(outer) = token {
            folded.wrap(outer);
        }
        folded
    }
}

/// Token, head and dim.
const MAX_LOOPS: usize = 3;
const NO_LOOP: AxisPair = AxisPair { extent: 1, to: 0, from: 0 };

/// Loops around a contiguous run of bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Folded {
    pub(super) run: u64,
    /// Innermost first; `depth` of them are in use.
    loops: [AxisPair; MAX_LOOPS],
    depth: usize,
}

impl Folded {
    /// Puts an axis around everything so far: makes the run, or the outermost loop, longer where it continues it on both
    /// sides.
    fn wrap(&mut self, axis: AxisPair) {
        if self.depth == 0 {
            if axis.to == self.run && axis.from == self.run {
                self.run *= u64::from(axis.extent);
                return;
            }
        } else {
            let last = &mut self.loops[self.depth - 1];
            let extent = u64::from(last.extent);
            if axis.to == last.to * extent
                && axis.from == last.from * extent
                && let Some(extent) = last.extent.checked_mul(axis.extent)
            {
                last.extent = extent;
                return;
            }
        }
        self.loops[self.depth] = axis;
        self.depth += 1;
    }

    /// How many runs there are.
    pub(super) fn count(&self) -> u64 {
        self.loops[..self.depth].iter().map(|axis| u64::from(axis.extent)).product()
    }

    /// Calls `emit` with the offsets (where written, where read) of each run, in ascending order of the first.
    #[inline]
    pub(super) fn each(&self, to: u64, from: u64, mut emit: impl FnMut(u64, u64)) {
        match self.depth {
            0 => emit(to, from),
            1 => Self::walk(self.loops[0], to, from, emit),
            2 => Self::walk(self.loops[1], to, from, |to, from| {
                Self::walk(self.loops[0], to, from, &mut emit);
            }),
            _ => Self::walk(self.loops[2], to, from, |to, from| {
                Self::walk(self.loops[1], to, from, |to, from| {
                    Self::walk(self.loops[0], to, from, &mut emit);
                });
            }),
        }
    }

    #[inline]
    fn walk(axis: AxisPair, mut to: u64, mut from: u64, mut emit: impl FnMut(u64, u64)) {
        for _ in 1..axis.extent {
            emit(to, from);
            to += axis.to;
            from += axis.from;
        }
        emit(to, from);
    }
}
