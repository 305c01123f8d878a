"""Common English words, for copying real words."""

_TEXT = """
able acid age air animal answer apple arm army art autumn baby back bag ball band bank base basket bath
beach bean bear beauty bed bell belt bench bird blade blood blue board boat body bone book border bottle
bottom bowl box brain branch bread bridge bright brother brown brush bucket build burn bus butter button
cake camp candle car card carpet castle cat cause chain chair chalk change cheese chest chicken child church
circle city clay clean clock cloth cloud coat coffee cold collar colour comb common cook copper corn corner
cotton cough country cow crowd cruel cup current curtain curve cushion dance danger dark daughter day deep
desert desk dinner direction dish distance doctor dog door doubt drawer dream dress drink driver drop dry
dust ear earth east edge egg elbow empty end engine evening eye face factory family farm fast father feather
field finger fire fish flag flame flat flight floor flower fly fold food foot forest fork fowl frame free
friend front fruit garden gate gentle giant gift girl glass glove goat gold grain grass gray green ground
group guide hair hammer hand happy harbour hat head heart heavy hill history hole holiday home honey hook
horn horse hospital hotel hour house hunger ice idea ink insect iron island jacket jelly jewel join journey
judge juice jump kettle key kick kind kitchen knee knife knot ladder lake lamp land language laugh lawyer
lead leaf leather left leg lemon lesson letter library light line lion lip list liver lock long loud love
lunch machine map mark market mask match meal meat medal metal middle milk mind mine minute mirror money
monkey month moon morning mother mountain mouth muscle music nail name narrow neck needle nerve net night
noise north nose note number nut ocean office oil old onion orange oven owner page paint paper parcel park
party paste path pen pencil people pepper picture pig pillow pin pipe place plane plant plate pleasure
pocket point poison pool potato pot powder present price prison pump purple quarter queen quick quiet rabbit
rail rain rat red rest rice ring river road rock roof room root rope rough round rule sad sail salt sand
school scissors sea season seat second seed sheep shelf ship shirt shoe shop short shoulder silver sister
skin skirt sky sleep slow smile smoke snake snow soap sock soft song sound soup south spade spoon spring
square stage stamp star station steam stem step stick stone store storm story street strong sugar summer sun
sweet table tail tall taste teacher thick thin thread throat thumb thunder ticket tired toe tomato tongue
tooth town toy train tray tree triangle trouble trousers turn uncle valley village violin voice wagon wall
warm watch water wave wax weather wet wheel whistle white wide window wing winter wire wise woman wood wool
word work worm year yellow young zebra
"""

WORDS = tuple(_TEXT.split())
